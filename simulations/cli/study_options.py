"""Options that the commands of a study share, and how they end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_vfl.simulations.config import RUN, RunConfig
from flower_vfl.simulations.report import write_report
from flower_vfl.simulations.studies.study import Study


def option(help: str, *names: str, panel: str = RUN) -> Any:
    """Return an option of a command in a panel of its help."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


Workers = Annotated[int, option("Runs at the same time, on Ray.")]
RayAddress = Annotated[str, option("A running Ray cluster; empty: this machine.")]
Gpus = Annotated[float, option("GPUs of each run on Ray, e.g. 0.25.")]
Engine = Annotated[str, option("As for 'run'.")]
Out = Annotated[
    Path | None, option("Folder of the study; what is finished there is not repeated.")
]
AsJson = Annotated[bool, option("Print the result as JSON and nothing else.", "--json")]
AsMarkdown = Annotated[bool, option("Print the table in Markdown.", "--markdown")]


def source_of(config: RunConfig) -> str:
    """Return the name of a run's data."""
    return Path(config.label_party).stem or config.dataset


def show_errors(study: Study) -> None:
    """Print which runs failed, and why."""
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


def finish(
    study: Study, found: dict[str, Any], as_json: bool, show: Callable[[], None]
) -> None:
    """Print what a study found, write its report; exit with 1 if a run failed."""
    if study.documents and not as_json:
        show()
    report = str(write_report(study.folder)) if study.documents else None
    if as_json:
        print(json.dumps(found | {"folder": str(study.folder), "report": report}))
    show_errors(study)
    if report and not as_json:
        print(report)
    if study.errors:
        raise typer.Exit(1)
