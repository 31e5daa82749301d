"""The parts of a report: sections with figures and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .scene import Scene, Style

Legend = Sequence[tuple[str, Style]]


@dataclass(frozen=True)
class Figure:
    """A chart with what is said below it."""

    name: str
    scene: Scene
    caption: str
    legend: Legend = ()
    series: tuple[int, ...] = ()
    attack: str = ""
    party: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is written, and the number that it is sorted by."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    series: Sequence[tuple[int, ...]] = ()
    sortable: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    key: str
    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    legend: Legend = field(default=())
    missing: str = ""
    small: bool = False


def average(values: Sequence[float], digits: int = 3) -> Cell:
    """Return mean and, of several values, standard deviation as a cell."""
    if not values:
        return Cell("")
    mean = statistics.mean(values)
    if len(values) == 1:
        return Cell(f"{mean:.{digits}f}", mean)
    spread = statistics.stdev(values)
    return Cell(f"{mean:.{digits}f} ± {spread:.{digits}f}", mean)


def number(value: float, digits: int = 3) -> Cell:
    """Return a number as a cell."""
    return Cell(f"{value:.{digits}f}", value)
