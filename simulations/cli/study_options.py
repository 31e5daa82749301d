"""Options that the commands of a study share, and how they end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flower_vfl.simulations.config import RUN, RunConfig
from flower_vfl.simulations.report import write_report
from flower_vfl.simulations.studies.study import Study

Workers = Annotated[
    int,
    typer.Option(help="Runs at the same time, on Ray.", rich_help_panel=RUN),
]
RayAddress = Annotated[
    str,
    typer.Option(
        help="A running Ray cluster; empty: this machine.", rich_help_panel=RUN
    ),
]
Gpus = Annotated[
    float,
    typer.Option(help="GPUs of each run on Ray, e.g. 0.25.", rich_help_panel=RUN),
]
Engine = Annotated[
    str,
    typer.Option(help="As for 'run'.", rich_help_panel=RUN),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the study; what is finished there is not repeated.",
        rich_help_panel=RUN,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the result as JSON and nothing else.", rich_help_panel=RUN
    ),
]


def source_of(config: RunConfig) -> str:
    """Return what a run's data is called."""
    return Path(config.label_party).stem or config.dataset


def show_errors(study: Study) -> None:
    """Say which runs failed, and why."""
    labels = {trial["key"]: trial["labels"] for trial in study.trials}
    for key, error in study.errors.items():
        what = ", ".join(f"{name} {value}" for name, value in labels[key].items())
        print(f"flower-vfl: {what}: {error['error']}", file=sys.stderr)
    if study.errors:
        print(
            f"flower-vfl: {len(study.errors)} of {len(study.trials)} runs failed; the "
            "same command tries them again and keeps the others",
            file=sys.stderr,
        )


def end(study: Study, report: Path | None = None) -> None:
    """Print errors and the path of the report; exit with 1 if a run failed."""
    show_errors(study)
    if report is not None:
        print(report)
    if study.errors:
        raise typer.Exit(1)


def report_of(study: Study) -> Path | None:
    """Write the report of a study; None if no run of it is finished."""
    return write_report(study.folder) if study.documents else None
