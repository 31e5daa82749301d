"""``flower-vfl report`` and ``audit``: what runs and recorded gradients show."""

import json
import webbrowser
from pathlib import Path

from rich.console import Console

from flower_vfl.leakage.recording import read_recording
from flower_vfl.simulations.printing import print_json, text_table
from flower_vfl.simulations.report import PICTURES_FOLDER, write_figures, write_report
from flower_vfl.simulations.studies.audit import DEFENSES, findings, leak_table, no_leak
from flower_vfl.simulations.studies.audit import audit as run_audit
from flower_vfl.specs import split_specs

from .options import finish


def report(
    folder: Path,
    pictures: bool = False,
    figures: Path | None = None,
    opened: bool = False,
    as_json: bool = False,
) -> None:
    """Write report.html: tables and charts in one self-contained file."""
    path = write_report(folder, pictures)
    drawn = sorted((folder / PICTURES_FOLDER).iterdir()) if pictures else []
    plotted = [] if figures is None else write_figures(folder, figures)
    if as_json:
        written = {"pictures": drawn, "figures": plotted}
        listed = {kind: [str(p) for p in paths] for kind, paths in written.items()}
        print_json({"report": str(path), **listed})
    else:
        if plotted:
            print(f"{len(plotted) // 3} figures in {figures}")
        if drawn:
            print(f"{len(drawn)} pictures in {folder / PICTURES_FOLDER}")
        print(path)
    if opened:
        webbrowser.open(path.resolve().as_uri())


def audit(
    recording: Path,
    attack: str = "",
    defenses: list[str] | None = None,
    task: str = "",
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Audit recorded gradients of any split-learning system.

    For example:
    flower-vfl audit recording/
    flower-vfl audit gradients.npz --attack norm,cosine --defense marvell:auc=0.65
    """
    found = read_recording(recording)
    study = run_audit(
        found,
        out or Path("runs") / f"audit-{recording.stem}",
        recording.name,
        split_specs(attack),
        defenses or DEFENSES,
        task or None,  # type: ignore[arg-type]  # infer_task refuses others
    )
    leaks, sentences = leak_table(study), list(findings(study))

    def show() -> None:
        cells = leaks.map("{:.3f}".format).reset_index().values.tolist()
        console = Console(highlight=False)
        rows = {name: len(set(own["row"])) for name, own in found.parties.items()}
        listed = ", ".join(f"{name} ({n} rows)" for name, n in rows.items())
        console.print(f"{recording.name}: {len(list(found.batches()))} steps; {listed}")
        console.print(text_table(["attack", "recorded", *leaks.columns[1:]], cells))
        what = f"leak AUC, {nothing:g}" if (nothing := no_leak(study)) else "|ρ|, 0"
        console.print(f"{what}: nothing leaks; at the party that learns most")
        console.print(*sentences, sep="\n")

    document = {"leaks": json.loads(leaks.to_json()), "findings": sentences}
    finish(study, document, as_json, show)
