"""``flower-vfl reproduce``: tables and figures of the papers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import typer
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.printing import print_json, text_table
from flower_vfl.simulations.runtime.engines import set_log
from flower_vfl.simulations.studies.study import Study

from ..papers import reproduce as runs
from ..papers import show
from ..papers.experiments import experiment_names, load_experiment
from .options import show_errors


def reproduce(
    names: list[str] | None = None,
    everything: bool = False,
    listing: bool = False,
    claims: bool = False,
    quick: bool = False,
    missing: bool = False,
    seeds: int | None = None,
    workers: int = 1,
    out: Path = Path("runs"),
    as_json: bool = False,
    markdown: bool = False,
    write: Path | None = None,
    source: list[Path] | None = None,
) -> None:
    """Reproduce a table or figure of a paper, next to the paper's values.

    Finished runs are not repeated, including those shared with other tables.
    """
    set_log(verbose=False)
    if listing:
        return _list(as_json)
    if claims:
        return _claims(as_json)
    if write is not None:
        return _write_page(write, source or [])
    names = experiment_names() if everything else names
    if not names:
        raise ConfigError("which table? Name one or more, or --all; see --list")
    experiments = [load_experiment(name, quick) for name in names]
    if everything:
        experiments.sort(key=lambda each: -each.minutes)
    quiet, failed, documents, times = as_json or markdown, False, [], []
    for experiment in experiments:
        folder = out / f"{runs.KIND}-{experiment.name}{'-quick' if quick else ''}"
        saved = runs.saved_results(experiment) if missing else pd.DataFrame()
        given = seeds, workers, quick, not quiet, saved
        study = runs.run_experiment(experiment, folder, *given)
        frame = runs.add_saved(
            experiment, runs.measured(experiment, study, seeds), saved
        )
        spent = f"{show.minutes_of(frame):.1f}"
        times.append([experiment.name, str(frame[runs.RUN].nunique()), spent])
        show_errors(study)
        failed |= bool(study.errors)
        if as_json:
            documents.append(show.as_document(experiment, frame, quick))
        elif markdown:
            print(show.as_markdown(experiment, frame, quick))
        else:
            show.show_experiment(experiment, frame, quick)
    if as_json:
        print_json(documents if len(documents) > 1 else documents[0])
    if len(times) > 1 and not quiet:
        _show(["name", "runs", "minutes"], times)
    if failed:
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    heads = ["name", "paper", "title", "runs", "minutes"]
    entries: list[dict[str, Any]] = []
    rows = []
    for each in map(load_experiment, experiment_names()):
        about, count = each.about, len(runs.trials_of(each))
        known = each.name, about["paper"], about["title"], count, each.minutes
        entries.append(dict(zip(heads, known, strict=True)))
        rows.append([each.name, about["title"], str(count), f"{each.minutes:g}"])
    if as_json:
        return print_json(entries)
    _show(["name", "title", "runs", "minutes"], rows, left=2)
    total = sum(entry["minutes"] for entry in entries) / 60.0
    print(
        f"Times are estimates for one core, {total:.1f} hours in all; runs that two "
        "tables share are run only once."
    )


def _claims(as_json: bool) -> None:
    found = show.all_claims()
    if as_json:
        return print_json(found)
    rows = [[claim[head] for head in show.CLAIM_HEADS] for claim in found]
    _show(show.CLAIM_HEADS, rows, left=len(show.CLAIM_HEADS))


def _show(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    table = text_table(heads, rows, left, lines=left > 2)
    Console(highlight=False).print(table)


def _write_page(path: Path, folders: list[Path]) -> None:
    for folder in folders:
        study = Study.load(folder)
        if study.kind != runs.KIND or study.extra.get("quick"):
            text = "is a smoke run or not a reproduced table; give a complete one"
            raise ConfigError(f"'{folder}' {text}")
        experiment = load_experiment(study.extra["name"])
        frame = runs.measured(experiment, study, study.extra.get("seeds"))
        frame = runs.add_saved(experiment, frame, runs.saved_results(experiment))
        print(f"kept {runs.save_results(experiment, frame)}")
    path.write_text(show.results_page(), encoding="utf-8")
    print(f"wrote {path}")
