"""A reproduced table for people: in the terminal, as Markdown, as JSON."""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from rich.console import Console

from flower_vfl.simulations.printing import markdown_table, text_table

from .experiments import PAPERS, Experiment, experiment_names, load_experiment
from .reproduce import SEED, Cell, Cells, cells_of, judge, outdated, saved_results

SMOKE = "smoke run: too little data and training for meaningful results"
_TEMPLATES = Environment(
    loader=FileSystemLoader(PAPERS), trim_blocks=True, keep_trailing_newline=True
)
_OVERVIEW = ["table", "runs", "values compared", "alike", "differ, with a reason"]
_OVERVIEW += ["differ, unexplained", "undecided"]
_OVERVIEW += ["claims that hold", "claims that fail", "claims undecided"]


def command_of(experiment: Experiment, quick: bool = False) -> str:
    """Return the command that makes a table."""
    own = "" if experiment.name in experiment_names() else ".toml"
    return f"flower-vfl reproduce {experiment.name}{own}{' --quick' if quick else ''}"


def _seeds(experiment: Experiment, frame: pd.DataFrame) -> str:
    if frame.empty:
        return "nothing has been run"
    counts = frame.groupby(list(experiment.axes), sort=False)[SEED].nunique()
    low, high = int(counts.min()), int(counts.max())
    seeds = f"{low} to {high} seeds" if low < high else f"{low} seeds"
    seeds = "1 seed" if high == 1 else seeds
    runnable = sum(row.config is not None for row in experiment.rows)
    return f"{seeds}; {len(counts)} of {runnable} rows"


def differences_of(experiment: Experiment, cells: Cells) -> dict[str, list[str]]:
    """Return the cells that differ from the paper's, by the reason that is known."""
    found: dict[str, list[str]] = {}
    for row in experiment.rows:
        for cell in cells[row.labels]:
            if cell.verdict(experiment.tolerance) == "differs":
                reason = experiment.reason(row, cell.column.name)
                text = f"{row.name}, {cell.column.name}"
                found.setdefault(reason, []).append(text)
    return found


def show_experiment(
    experiment: Experiment, frame: pd.DataFrame, quick: bool = False
) -> None:
    """Print a table."""
    console, about = Console(highlight=False), experiment.about
    cells = cells_of(experiment, frame)
    mark = f" ({SMOKE})" if quick else ""
    console.print(f"{about['paper']}, {about['title']}{mark}", markup=False)
    rows = _texts(experiment, cells, _two_lines)
    console.print(text_table(_heads(experiment), rows, left=len(experiment.axes)))
    console.print("first line: our value; second line: the paper's value", style="dim")
    notes = [*_notes(experiment, cells, quick), f"Seeds: {_seeds(experiment, frame)}"]
    for line in [*notes, f"Command: {command_of(experiment, quick)}"]:
        console.print(line.replace("**", ""), markup=False, soft_wrap=True)


def _two_lines(cell: Cell, missing: str) -> str:
    ours = cell.text or ("no data" if missing else "-")
    paper = cell.paper.replace("±", " ±").replace("  ", " ")  # where a line may end
    return f"{ours}\n[dim]{paper or '-'}[/dim]"


def _notes(experiment: Experiment, cells: Cells, quick: bool) -> Iterator[str]:
    """Yield what a reader of a table needs to know, line by line."""
    yield f"Data: {experiment.about['data']}"
    yield f"Scaled down: {experiment.about['scaled']}"
    missing: dict[str, set[str]] = {}
    for row in experiment.rows:
        if row.missing:
            missing.setdefault(row.missing, set()).add(row.labels[0])
    for reason, names in missing.items():
        yield f"Not run: {', '.join(sorted(names))}: {reason}"
    if quick:
        return
    for claim in claims_of(experiment, cells):
        yield f"The paper: {claim}"
    for reason, where in differences_of(experiment, cells).items():
        known = "" if reason else ", **unexplained**"
        yield f"Differs{known}: {'; '.join(where)}. {reason}".rstrip()


def claims_of(experiment: Experiment, cells: Cells) -> list[str]:
    """Return the claims of the paper's text, and our values."""
    lines = []
    for claim in experiment.claims:
        found = judge(claim, experiment, cells)
        ours = "" if found.value is None else f" Ours: {found.value:.3f}"
        if found.beside:
            ours += f" vs {' and '.join(f'{other:.3f}' for other in found.beside)}"
        if ours:
            ours += f" ({found.says})." if found.says else "."
        lines.append(f"{claim.text}{ours}")
    return lines


def as_document(
    experiment: Experiment, frame: pd.DataFrame, quick: bool = False
) -> dict[str, Any]:
    """Return a table as a JSON document."""
    cells = cells_of(experiment, frame)
    rows = [
        {
            **dict(zip(experiment.axes, row.labels, strict=True)),
            "missing": row.missing,
            "cells": {
                cell.column.name: {
                    "value": cell.value,
                    "deviation": cell.deviation,
                    "standard_error": cell.error if len(cell.values) > 1 else None,
                    "seeds": list(cell.values),
                    "paper": cell.paper,
                }
                for cell in cells[row.labels]
            },
        }
        for row in experiment.rows
    ]
    return {
        "name": experiment.name,
        **experiment.about,
        "smoke_run": quick,
        "command": command_of(experiment, quick),
        "rows": rows,
        "claims": claims_of(experiment, cells),
        "differences": [
            {"reason": reason, "cells": where}
            for reason, where in differences_of(experiment, cells).items()
        ],
    }


def as_markdown(
    experiment: Experiment, frame: pd.DataFrame, quick: bool = False
) -> str:
    """Return a table as Markdown."""
    cells, heads = cells_of(experiment, frame), _heads(experiment)
    rows = _texts(experiment, cells, _one_line)
    return _TEMPLATES.get_template("table.md").render(
        about=experiment.about,
        smoke=SMOKE.capitalize() if quick else "",
        command=command_of(experiment, quick),
        found=not frame.empty,
        table=markdown_table(heads, rows, left=len(heads)),
        seeds=_seeds(experiment, frame),
        notes=list(_notes(experiment, cells, quick)),
        changed=[] if quick or frame.empty else outdated(experiment, frame),
    )


def _heads(experiment: Experiment) -> list[str]:
    return [*experiment.axes, *(column.name for column in experiment.shown)]


def _texts(
    experiment: Experiment, cells: Cells, text: Callable[[Cell, str], str]
) -> list[list[str]]:
    return [
        [*row.labels, *(text(cell, row.missing) for cell in cells[row.labels])]
        for row in experiment.rows
    ]


def _one_line(cell: Cell, missing: str) -> str:
    ours = cell.text or ("no data" if missing else "")
    return f"{ours} / {cell.paper}" if cell.paper else ours


def results_page() -> str:
    """Return the page of all results that are kept with the package."""
    experiments = [load_experiment(name) for name in experiment_names()]
    made = [(experiment, saved_results(experiment)) for experiment in experiments]
    counted = [_counted(experiment, frame) for experiment, frame in made]
    return _TEMPLATES.get_template("results.md").render(
        overview=markdown_table(_OVERVIEW, counted, left=len(_OVERVIEW)),
        tables=[(each.about["paper"], as_markdown(each, f)) for each, f in made],
    )


def _counted(experiment: Experiment, frame: pd.DataFrame) -> list[str]:
    """Return a table's line of the overview."""
    title = f"{experiment.about['paper']}, {experiment.about['title']}"
    if frame.empty:
        return [title, "not run yet", *[""] * (len(_OVERVIEW) - 2)]
    cells = cells_of(experiment, frame)
    found = [c.verdict(experiment.tolerance) for row in cells.values() for c in row]
    found = [each for each in found if each is not None]
    unexplained = len(differences_of(experiment, cells).get("", []))
    claims = [judge(claim, experiment, cells).says for claim in experiment.claims]
    counts = [len(found), found.count("alike"), found.count("differs") - unexplained]
    counts += [unexplained, found.count("undecided")]
    counts += [claims.count("holds"), claims.count("fails"), claims.count("undecided")]
    return [title, _seeds(experiment, frame), *map(str, counts)]
