"""A reproduced table for people: in the terminal, as Markdown, as JSON."""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from rich.console import Console

from flower_vfl.simulations.printing import markdown_table, text_tables

from . import reproduce
from .experiments import PAPERS, Claim, Experiment, experiment_names, load_experiment
from .reproduce import RUN, SECONDS, SEED, Cell, Cells, cells_of, judge

SMOKE = "smoke run: too little data and training for meaningful results"
_TEMPLATES = Environment(
    loader=FileSystemLoader(PAPERS), trim_blocks=True, keep_trailing_newline=True
)
_OVERVIEW = ["table", "runs", "minutes", "values compared", "alike"]
_OVERVIEW += ["differ, with a reason", "differ, unexplained", "undecided"]
_OVERVIEW += ["claims held", "claims missed", "claims undecided"]
Saved = list[tuple[Experiment, pd.DataFrame]]  # with what was found
CLAIM_HEADS = ["table", "claim", "paper", "ours", "verdict"]


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


def minutes_of(frame: pd.DataFrame) -> float:
    """Return how long the runs of a table took, shared ones counted once."""
    return float(frame.drop_duplicates(RUN)[SECONDS].sum()) / 60.0


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


def show_experiment(experiment: Experiment, frame: pd.DataFrame, quick: bool) -> None:
    """Print a table."""
    console, cells = Console(highlight=False), cells_of(experiment, frame)
    mark = f" ({SMOKE})" if quick else ""
    console.print(f"{experiment.full_title}{mark}", markup=False)
    rows = _texts(experiment, cells, _two_lines)
    for table in text_tables(_heads(experiment), rows, left=len(experiment.axes)):
        console.print(table)
    console.print("first line: our value; second line: the paper's value", style="dim")
    notes = [*_notes(experiment, cells, quick)]
    for claim in () if quick else claims_of(experiment, cells):
        ours = f" Ours: {claim['ours']} ({claim['verdict']})."
        notes.append(f"The paper: {claim['claim']}{ours if claim['verdict'] else ''}")
    notes += [f"Seeds: {_seeds(experiment, frame)}"]
    notes += [f"Time: {minutes_of(frame):.1f} minutes"]
    for line in [*notes, f"Command: {command_of(experiment, quick)}"]:
        console.print(line.replace("**", ""), markup=False, soft_wrap=True)


def _two_lines(cell: Cell, missing: str) -> str:
    ours = cell.text or ("no data" if missing else "-")
    paper = cell.paper.replace("±", " ±").replace("  ", " ")  # where a line may end
    return f"{ours}\n{paper or '-'}"


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
    for reason, where in differences_of(experiment, cells).items():
        known = "" if reason else ", **unexplained**"
        yield f"Differs{known}: {'; '.join(where)}. {reason}".rstrip()


def claims_of(experiment: Experiment, cells: Cells) -> Iterator[dict[str, Any]]:
    """Yield the claims of the paper's text: its values, ours, and the verdict."""
    for claim in experiment.claims:
        found = judge(claim, experiment, cells)
        ours = "" if found.own is None else found.own.text
        yield {
            "table": experiment.full_title,
            "claim": claim.text.strip(),
            "paper": _printed(claim, experiment),
            "ours": " vs ".join([ours, *(cell.text for cell in found.beside)]),
            "verdict": found.says,
            "headline": claim.headline,
        }


def _printed(claim: Claim, experiment: Experiment) -> str:
    """Return what the paper prints of a claim, and the limit that we check."""
    labels = {row.name: row.labels for row in experiment.rows}
    own, above, below = (
        experiment.figure(labels[row], claim.column) if row else ""
        for row in (claim.row, claim.above, claim.below)
    )
    if claim.above or claim.below:
        sign, word = (">", "higher") if claim.above else ("<", "lower")
        return f"{own} {sign} {above or below}" if own and above + below else word
    limits = (("≥", claim.least), ("≤", claim.most))
    signed = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
    checked = ", ".join(signed)
    return f"{own} ({checked})" if own and checked else own or checked


def all_claims(saved: Saved | None = None) -> list[dict[str, Any]]:
    """Return the claims of all papers with the saved results, headlines first."""
    claims = [
        claim
        for experiment, frame in saved or _saved()
        for claim in claims_of(experiment, cells_of(experiment, frame))
    ]
    return sorted(claims, key=lambda claim: not claim["headline"])


def _saved() -> Saved:
    experiments = map(load_experiment, experiment_names())
    return [(each, reproduce.saved_results(each)) for each in experiments]


def as_document(
    experiment: Experiment, frame: pd.DataFrame, quick: bool = False
) -> dict[str, Any]:
    """Return a table as a JSON document."""
    cells = cells_of(experiment, frame)
    rows = []
    for row in experiment.rows:
        labels = dict(zip(experiment.axes, row.labels, strict=True))
        own = {cell.column.name: _described(cell) for cell in cells[row.labels]}
        rows.append({**labels, "missing": row.missing, "cells": own})
    differences = differences_of(experiment, cells).items()
    return {
        "name": experiment.name,
        **experiment.about,
        "smoke_run": quick,
        "command": command_of(experiment, quick),
        "rows": rows,
        "minutes": minutes_of(frame),
        "claims": list(claims_of(experiment, cells)),
        "differences": [{"reason": why, "cells": where} for why, where in differences],
    }


def _described(cell: Cell) -> dict[str, Any]:
    error = cell.error if len(cell.values) > 1 else None
    found = {"value": cell.value, "deviation": cell.deviation, "standard_error": error}
    return found | {"seeds": list(cell.values), "paper": cell.paper}


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
        minutes="" if frame.empty else f"{minutes_of(frame):.1f}",
        notes=list(_notes(experiment, cells, quick)),
        changed=[] if quick or frame.empty else reproduce.outdated(experiment, frame),
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
    made = _saved()
    claims = all_claims(made)
    counted = [_counted(experiment, frame) for experiment, frame in made]
    counts = pd.DataFrame([row[2:] for row in counted if row[2:]])
    total = ["**all**", "", *(f"{value:g}" for value in counts.astype(float).sum())]
    overview = [[*row, *[""] * len(_OVERVIEW)][: len(_OVERVIEW)] for row in counted]
    chosen = [[claim[head] for head in CLAIM_HEADS] for claim in claims]
    headlines = sum(claim["headline"] for claim in claims)
    left = len(CLAIM_HEADS)
    return _TEMPLATES.get_template("results.md").render(
        headlines=markdown_table(CLAIM_HEADS, chosen[:headlines], left=left),
        claims=markdown_table(CLAIM_HEADS, chosen[headlines:], left=left),
        overview=markdown_table(_OVERVIEW, [*overview, total], left=len(_OVERVIEW)),
        tables=[(each.about["paper"], as_markdown(each, f)) for each, f in made],
    )


def _counted(experiment: Experiment, frame: pd.DataFrame) -> list[str]:
    """Return a table's line of the overview."""
    if frame.empty:
        return [experiment.full_title, "not run yet"]
    cells = cells_of(experiment, frame)
    found = [c.verdict(experiment.tolerance) for row in cells.values() for c in row]
    found = [each for each in found if each is not None]
    unexplained = len(differences_of(experiment, cells).get("", []))
    claims = [judge(claim, experiment, cells).says for claim in experiment.claims]
    counts = [round(minutes_of(frame)), len(found), found.count("alike")]
    counts += [found.count("differs") - unexplained, unexplained]
    counts += [found.count("undecided")]
    counts += [claims.count("held"), claims.count("missed"), claims.count("undecided")]
    return [experiment.full_title, _seeds(experiment, frame), *map(str, counts)]
