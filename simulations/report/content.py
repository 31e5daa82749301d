"""The parts of a report: sections with figures and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .scene import Scene, Style

Legend = Sequence[tuple[str, Style]]


@dataclass(frozen=True)
class Figure:
    """A chart with what is said below it.

    Parameters
    ----------
    name : str
        Name of its picture files, without an ending.
    scene : Scene
        The chart.
    caption : str
        What is said below it.
    legend : Legend (default: ())
        Name and style of everything in it, for a picture that stands alone.
    series : tuple[int, ...] (default: ())
        Numbers of the groups that all of it belongs to, if it belongs to some.
    attack, party : str (default: "")
        What it is about.
    """

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
    """A table.

    Parameters
    ----------
    caption : str
        What it is.
    heads : Sequence[str]
        Names of the columns.
    rows : Sequence[Sequence[Cell]]
        The rows.
    series : Sequence[tuple[int, ...]] (default: ())
        Numbers of the groups that each row belongs to.
    sortable : bool (default: False)
        Whether a reader can sort it.
    folded : bool (default: False)
        Whether a reader has to unfold it.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    series: Sequence[tuple[int, ...]] = ()
    sortable: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Parameters
    ----------
    key : str
        Its anchor.
    title : str
        Its heading.
    text : str (default: "")
        What is to be known about it.
    figures : Sequence[Figure] (default: ())
        Its charts.
    tables : Sequence[Table] (default: ())
        Its tables.
    legend : Legend (default: ())
        Of what is in the figures beside the groups, such as classes.
    missing : str (default: "")
        Why it is empty, if it is.
    small : bool (default: False)
        Whether its charts are small.
    """

    key: str
    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    legend: Legend = field(default=())
    missing: str = ""
    small: bool = False


def average(values: Sequence[float], digits: int = 3) -> Cell:
    """Return mean and, of several values, standard deviation as a cell.

    Parameters
    ----------
    values : Sequence[float]
        The values; none gives an empty cell.
    digits : int (default: 3)
        Digits after the point.
    """
    if not values:
        return Cell("")
    mean = statistics.mean(values)
    if len(values) == 1:
        return Cell(f"{mean:.{digits}f}", mean)
    spread = statistics.stdev(values)
    return Cell(f"{mean:.{digits}f} ± {spread:.{digits}f}", mean)


def number(value: float, digits: int = 3) -> Cell:
    """Return a number as a cell.

    Parameters
    ----------
    value : float
        The number.
    digits : int (default: 3)
        Digits after the point.
    """
    return Cell(f"{value:.{digits}f}", value)
