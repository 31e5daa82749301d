"""``flower-vfl reproduce``: tables and figures of the papers."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.printing import text_table
from flower_vfl.simulations.runtime.engines import set_log
from flower_vfl.simulations.studies.study import Study

from ..papers.experiments import experiment_names, load_experiment
from ..papers.reproduce import (
    KIND,
    RUN,
    add_saved,
    measured,
    run_experiment,
    save_results,
    saved_results,
    trials_of,
)
from ..papers.show import (
    CLAIM_HEADS,
    all_claims,
    as_document,
    as_markdown,
    minutes_of,
    results_page,
    show_experiment,
)
from .options import AsJson, AsMarkdown, Workers, option, show_errors


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Tables or figures (see --list), or a TOML file."),
    ] = None,
    everything: Annotated[
        bool, option("All tables and figures, those that take longest first.", "--all")
    ] = False,
    listing: Annotated[
        bool, option("List all tables and figures, with estimated times.", "--list")
    ] = False,
    claims: Annotated[
        bool, option("Show the papers' claims and the saved results.", "--claims")
    ] = False,
    quick: Annotated[
        bool, option("Smoke run: few rows, one epoch, one seed.", "--quick")
    ] = False,
    missing: Annotated[
        bool, option("Run only what the saved results lack.", "--missing")
    ] = False,
    seeds: Annotated[int | None, option("Number of seeds per row.", min=1)] = None,
    workers: Workers = 1,
    out: Annotated[Path, option("Output folder; each table gets a subfolder.")] = Path(
        "runs"
    ),
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
    write: Annotated[
        Path | None, option("Write the page with all saved results to this file.")
    ] = None,
    source: Annotated[
        list[Path] | None,
        option("Folder of a finished table to add to that page.", "--from"),
    ] = None,
) -> None:
    """Reproduce a table or figure of a paper, next to the paper's values.

    Finished runs are not repeated, including those shared with other tables.
    """
    set_log(verbose=False)
    if listing:
        _list(as_json)
        return
    if claims:
        _claims(as_json)
        return
    if write is not None:
        _write_page(write, source or [])
        return
    names = experiment_names() if everything else names
    if not names:
        raise ConfigError("which table? Name one or more, or --all; see --list")
    experiments = [load_experiment(name, quick) for name in names]
    if everything:
        experiments.sort(key=lambda each: -each.minutes)
    quiet, failed, documents, times = as_json or markdown, False, [], []
    for experiment in experiments:
        folder = out / f"{KIND}-{experiment.name}{'-quick' if quick else ''}"
        saved = saved_results(experiment) if missing else pd.DataFrame()
        study = run_experiment(
            experiment, folder, seeds, workers, quick, not quiet, saved
        )
        frame = add_saved(experiment, measured(experiment, study, seeds), saved)
        spent = f"{minutes_of(frame):.1f}"
        times.append([experiment.name, str(frame[RUN].nunique()), spent])
        show_errors(study)
        failed |= bool(study.errors)
        if as_json:
            documents.append(as_document(experiment, frame, quick))
        elif markdown:
            print(as_markdown(experiment, frame, quick))
        else:
            show_experiment(experiment, frame, quick)
    if as_json:
        print(json.dumps(documents if len(documents) > 1 else documents[0]))
    if len(times) > 1 and not quiet:
        _show(["name", "runs", "minutes"], times)
    if failed:
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    known = [load_experiment(name) for name in experiment_names()]
    entries: list[dict[str, Any]] = [
        {
            "name": experiment.name,
            "paper": experiment.about["paper"],
            "title": experiment.about["title"],
            "runs": len(trials_of(experiment)),
            "minutes": experiment.minutes,
        }
        for experiment in known
    ]
    if as_json:
        print(json.dumps(entries))
        return
    rows = [
        [entry["name"], entry["title"], str(entry["runs"]), f"{entry['minutes']:g}"]
        for entry in entries
    ]
    _show(["name", "title", "runs", "minutes"], rows, left=2)
    total = sum(entry["minutes"] for entry in entries) / 60.0
    print(
        f"Times are estimates for one core, {total:.1f} hours in all; runs that two "
        "tables share are run only once."
    )


def _claims(as_json: bool) -> None:
    found = all_claims()
    if as_json:
        print(json.dumps(found))
        return
    rows = [[claim[head] for head in CLAIM_HEADS] for claim in found]
    _show(CLAIM_HEADS, rows, left=len(CLAIM_HEADS))


def _show(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    table = text_table(heads, rows, left, lines=left > 2)
    Console(highlight=False).print(table)


def _write_page(path: Path, folders: list[Path]) -> None:
    for folder in folders:
        study = Study.load(folder)
        if study.kind != KIND or study.extra.get("quick"):
            raise ConfigError(
                f"'{folder}' is a smoke run or not a reproduced table; only complete "
                "tables are saved"
            )
        experiment = load_experiment(study.extra["name"])
        frame: pd.DataFrame = measured(experiment, study, study.extra.get("seeds"))
        frame = add_saved(experiment, frame, saved_results(experiment))
        print(f"kept {save_results(experiment, frame)}")
    path.write_text(results_page(), encoding="utf-8")
    print(f"wrote {path}")
