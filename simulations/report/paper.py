"""The figures of a paper, beside those of a study that repeats them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_vfl.simulations.papers.cells import cells_of
from flower_vfl.simulations.papers.experiments import experiment_names, load_experiment
from flower_vfl.simulations.papers.reproduce import KIND, measured
from flower_vfl.simulations.studies.study import Study

from .content import Cell, Section, Table


def our_figures(study: Study) -> list[dict[str, Any]]:
    """Return what a study found, in the cells of the paper's table."""
    name = study.extra.get("name")
    if study.kind != KIND or name not in experiment_names():
        return []
    experiment = load_experiment(name, bool(study.extra.get("quick")))
    found = cells_of(experiment, measured(experiment, study, study.extra.get("seeds")))
    return [
        {"labels": labels, "figures": {cell.column.name: cell.text for cell in cells}}
        for labels, cells in found.items()
    ]


def paper_section(extra: Mapping[str, Any]) -> Section | None:
    """Return the figures of the paper that a study repeats, beside ours."""
    if "paper" not in extra:
        return None
    columns = [str(column) for column in extra.get("columns", ())]
    ours = {tuple(row["labels"]): row["figures"] for row in extra.get("ours", ())}
    theirs = {tuple(row["labels"]): row["figures"] for row in extra["paper"]}
    rows = []
    for labels in dict.fromkeys([*theirs, *ours]):
        row = [Cell(" / ".join(map(str, labels)))]
        for column in columns:
            row.append(Cell(str(ours.get(labels, {}).get(column, ""))))
            row.append(Cell(str(theirs.get(labels, {}).get(column, ""))))
        rows.append(row)
    both = [f"{column}, {who}" for column in columns for who in ("ours", "paper")]
    if not ours:
        both = both[1::2]
        rows = [[row[0], *row[2::2]] for row in rows]
    table = Table("The paper's figures", ["row", *both], rows)
    note = str(extra.get("note", ""))
    return Section("paper", "Beside the paper", note, tables=[table])
