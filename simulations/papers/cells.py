"""Our values in the cells of a paper's table, beside the paper's own."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .experiments import Claim, Column, Experiment

SEED = "seed"  # column of a table's values that says which seed they are of
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_DEVIATIONS = 2.0  # so many may our mean be away from the paper's


@dataclass(frozen=True)
class Cell:
    """One of our values beside the paper's."""

    values: tuple[float, ...]
    column: Column
    paper: str

    @property
    def value(self) -> float | None:
        """What is shown: the mean, smallest or largest value over the seeds."""
        if not self.values:
            return None
        if self.column.seeds == "mean":
            return statistics.fmean(self.values)
        return (min if self.column.seeds == "min" else max)(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation beside a mean of several seeds."""
        if self.column.seeds != "mean" or len(self.values) < 2:
            return None
        return statistics.stdev(self.values)

    @property
    def text(self) -> str:
        """The value as it is shown."""
        if self.value is None:
            return ""
        digits = self.column.digits
        sign = "%" if self.column.how == "percent" and self.column.beside else ""
        text = f"{self.value:.{digits}f}{sign}"
        if self.deviation is not None:
            text += f" ± {self.deviation:.{digits}f}"
        return text

    def differs(self, tolerance: float) -> bool:
        """Return whether our value is another than the paper's, beyond chance."""
        numbers = [float(n) for n in _NUMBER.findall(self.paper.replace("−", "-"))]
        if self.value is None or not numbers:
            return False
        theirs = numbers[1] if "±" in self.paper else 0.0
        chance = _DEVIATIONS * math.hypot(self.deviation or 0.0, theirs)
        return abs(self.value - numbers[0]) > max(tolerance, chance)


def cells_of(
    experiment: Experiment, frame: pd.DataFrame
) -> dict[tuple[str, ...], list[Cell]]:
    """Return the cells of every row, one for each column that is not hidden."""
    lines: dict[tuple[str, ...], dict[int, Mapping[str, Any]]] = {}
    for record in frame.to_dict("records"):
        line = {str(name): value for name, value in record.items()}
        labels = tuple(str(line[axis]) for axis in experiment.axes)
        lines.setdefault(labels, {})[int(line[SEED])] = line
    return {
        row.labels: [
            Cell(
                _values(lines, row.labels, column),
                column,
                experiment.figure(row.labels, column.name),
            )
            for column in experiment.shown
        ]
        for row in experiment.rows
    }


def _values(
    lines: Mapping[tuple[str, ...], Mapping[int, Mapping[str, Any]]],
    labels: tuple[str, ...],
    column: Column,
) -> tuple[float, ...]:
    """Return the values of a cell, compared with another row where that is asked."""

    def scaled(line: Mapping[str, Any]) -> float:
        return float(line[column.name]) * column.scale

    own = {seed: scaled(line) for seed, line in lines.get(labels, {}).items()}
    if column.beside:
        other = lines.get((*labels[:-1], column.beside), {})
        own = {
            seed: compare(value, scaled(other[seed]), column.how)
            for seed, value in own.items()
            if seed in other
        }
    return tuple(value for value in own.values() if not math.isnan(value))


def compare(value: float, other: float, how: str) -> float:
    """Return a value beside another."""
    if how == "difference":
        return value - other
    if not other:
        return math.nan
    return value / other if how == "ratio" else 100.0 * (value / other - 1.0)


@dataclass(frozen=True)
class Verdict:
    """What a claim of a paper comes to with our values."""

    value: float | None
    beside: tuple[float, ...]
    held: bool | None


def judge(
    claim: Claim, experiment: Experiment, cells: Mapping[tuple[str, ...], list[Cell]]
) -> Verdict:
    """Return what a claim comes to: above or below another row is not the same value."""
    names = [column.name for column in experiment.shown]
    by_name = {" / ".join(labels): row for labels, row in cells.items()}

    def look(row: str) -> float | None:
        return by_name[row][names.index(claim.column)].value if row else None

    value, above, below = look(claim.row), look(claim.above), look(claim.below)
    beside = tuple(other for other in (above, below) if other is not None)
    if value is None or (not beside and claim.least is claim.most is None):
        return Verdict(value, (), None)
    held = (
        (claim.least is None or value >= claim.least)
        and (claim.most is None or value <= claim.most)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    return Verdict(value, beside, held)
