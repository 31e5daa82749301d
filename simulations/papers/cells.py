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


Cells = Mapping[tuple[str, ...], list[Cell]]  # by the labels of a row


def cells_of(experiment: Experiment, frame: pd.DataFrame) -> Cells:
    """Return the cells of every row, one for each column that is not hidden."""
    found: dict[Any, pd.DataFrame] = {}
    if not frame.empty:
        groups = frame.groupby(list(experiment.axes), sort=False)
        found = {labels: own.set_index(SEED) for labels, own in groups}
    return {
        row.labels: [
            Cell(
                _values(found, row.labels, column),
                column,
                experiment.figure(row.labels, column.name),
            )
            for column in experiment.shown
        ]
        for row in experiment.rows
    }


def _values(
    found: Mapping[Any, pd.DataFrame], labels: tuple[str, ...], column: Column
) -> tuple[float, ...]:
    """Return the values of a cell, compared with another row where that is asked."""
    beside = (*labels[:-1], column.beside) if column.beside else labels
    if labels not in found or beside not in found:
        return ()
    own, other = (found[row][column.name] * column.scale for row in (labels, beside))
    values = compare(own, other, column.how) if column.beside else own
    return tuple(values.dropna())


def compare(
    own: pd.Series[float], other: pd.Series[float], how: str
) -> pd.Series[float]:
    """Return values beside others of the same seeds."""
    own, other = own.align(other, join="inner")
    if how == "difference":
        return own - other
    ratio = own / other.where(other != 0.0)
    return ratio if how == "ratio" else 100.0 * (ratio - 1.0)


@dataclass(frozen=True)
class Verdict:
    """What a claim of a paper comes to with our values."""

    value: float | None
    beside: tuple[float, ...]
    held: bool | None


def judge(claim: Claim, experiment: Experiment, cells: Cells) -> Verdict:
    """Return whether our values support a claim; equal is neither above nor below."""
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
