"""Tables and figures of papers as data: what was run, how, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .config import RunConfig


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Parameters
    ----------
    name : str
        Its heading.
    reading : str
        What is read from a run, a name of ``READINGS``; or from other columns, a name
        of ``DERIVED``.
    arguments : dict[str, Any] (default: {})
        Of the reading.
    seeds : {"mean", "min", "max"} (default: "mean")
        What becomes of the values of several seeds; ``"mean"`` with their deviation.
    digits : int (default: 3)
        Digits after the point.
    scale : float (default: 1.0)
        What a value is multiplied by, 100 for percent.
    beside : str (default: "")
        Choice of the last axis whose value the column is compared with, seed by seed.
    how : {"ratio", "difference", "percent"} (default: "ratio")
        How it is compared.
    hidden : bool (default: False)
        Whether it is there for other columns only.
    """

    name: str
    reading: str
    arguments: dict[str, Any] = field(default_factory=dict)
    seeds: str = "mean"
    digits: int = 3
    scale: float = 1.0
    beside: str = ""
    how: str = "ratio"
    hidden: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a table: a run, repeated with several seeds.

    Parameters
    ----------
    labels : tuple[str, ...]
        Its choice on every axis.
    config : RunConfig | None
        The settings without the seed; None if it cannot be run here.
    seeds : int
        How often it is run.
    missing : str (default: "")
        Why it cannot.
    """

    labels: tuple[str, ...]
    config: RunConfig | None
    seeds: int
    missing: str = ""

    @property
    def name(self) -> str:
        """The labels in one line."""
        return " / ".join(self.labels)


@dataclass(frozen=True)
class Claim:
    """What a paper says in words, and what of it can be looked up in the table.

    Parameters
    ----------
    text : str
        What it says.
    row, column : str (default: "")
        The value that it is about; the row as in ``Row.name``.
    least, most : float | None (default: None)
        What that value should not be below or above.
    above, below : str (default: "")
        The row whose value it should be above or below.
    """

    text: str
    row: str = ""
    column: str = ""
    least: float | None = None
    most: float | None = None
    above: str = ""
    below: str = ""


@dataclass(frozen=True)
class Difference:
    """Why some of our values differ from the paper's.

    Parameters
    ----------
    where : str
        Pattern of ``row / column``, with * for anything.
    text : str
        The reason; empty if there is none that we know.
    """

    where: str
    text: str


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Parameters
    ----------
    name : str
        Name of its file.
    about : dict[str, str]
        ``paper``, ``title``, ``shows``, which ``data`` stood in, and how the
        experiment was ``scaled`` down.
    minutes : float
        How long it takes, about, on one core.
    axes : dict[str, list[str]]
        Choices by axis.
    rows : list[Row]
        All of their combinations.
    columns : list[Column]
        What is read.
    figures : dict[tuple[str, ...], list[str]]
        The paper's figures of a row, one for each column that is not hidden.
    claims : list[Claim]
        What the paper says in words.
    differences : list[Difference]
        What is known about differences.
    tolerance : float
        A difference beyond it, and beyond the seeds' deviation, is to be explained.
    """

    name: str
    about: dict[str, str]
    minutes: float
    axes: dict[str, list[str]]
    rows: list[Row]
    columns: list[Column]
    figures: dict[tuple[str, ...], list[str]]
    claims: list[Claim]
    differences: list[Difference]
    tolerance: float

    @property
    def shown(self) -> list[Column]:
        """The columns that are not hidden."""
        return [column for column in self.columns if not column.hidden]

    def figure(self, labels: tuple[str, ...], column: str) -> str:
        """Return what the paper prints in a cell, or nothing.

        Parameters
        ----------
        labels : tuple[str, ...]
            Of the row.
        column : str
            Name of the column.
        """
        names = [shown.name for shown in self.shown]
        return dict(zip(names, self.figures.get(labels, []), strict=False)).get(
            column, ""
        )

    def reason(self, row: Row, column: str) -> str:
        """Return why our value differs from the paper's; empty if nobody knows.

        Parameters
        ----------
        row : Row
            The row.
        column : str
            Name of the column.
        """
        cell = f"{row.name} / {column}"
        for difference in self.differences:
            if fnmatchcase(cell, difference.where):
                return difference.text
        return ""
