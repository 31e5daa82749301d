"""``flower-vfl reproduce``: tables and figures of the papers."""

import json
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
from ..papers.reproduce import KIND, measured, run_experiment, save_results, trials_of
from ..papers.show import as_document, as_markdown, results_page, show_experiment
from .options import AsJson, AsMarkdown, Workers, option, show_errors


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Tables or figures (see --list), 'all', or a TOML file."),
    ] = None,
    listing: Annotated[
        bool, option("List all tables and figures, with estimated times.", "--list")
    ] = False,
    quick: Annotated[
        bool, option("Smoke run: few rows, one epoch, one seed.", "--quick")
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
    if write is not None:
        _write_page(write, source or [])
        return
    if not names:
        raise ConfigError("which table? Name one or more, or 'all'; see --list")
    chosen = experiment_names() if names == ["all"] else names
    experiments = [load_experiment(name, quick) for name in chosen]
    quiet, failed, documents = as_json or markdown, False, []
    for experiment in experiments:
        folder = out / f"{KIND}-{experiment.name}{'-quick' if quick else ''}"
        study = run_experiment(experiment, folder, seeds, workers, quick, not quiet)
        frame = measured(experiment, study, seeds)
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
    console = Console(highlight=False)
    console.print(text_table(["name", "title", "runs", "minutes"], rows, left=2))
    total = sum(entry["minutes"] for entry in entries) / 60.0
    console.print(
        f"Times are estimates for one core, {total:.1f} hours in all; runs that two "
        "tables share are run only once."
    )


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
        print(f"kept {save_results(experiment, frame)}")
    path.write_text(results_page(), encoding="utf-8")
    print(f"wrote {path}")
