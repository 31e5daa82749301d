"""Tables and figures of papers as data: what was run, how, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from flower_vfl.simulations.config import RunConfig


@dataclass(frozen=True)
class Column:
    """One column of a table."""

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
    """One row of a table: a run, repeated with several seeds."""

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
    """What a paper says in words, and what of it can be looked up in the table."""

    text: str
    row: str = ""
    column: str = ""
    least: float | None = None
    most: float | None = None
    above: str = ""
    below: str = ""


@dataclass(frozen=True)
class Difference:
    """Why some of our values differ from the paper's."""

    where: str
    text: str


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper."""

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
        """Return what the paper prints in a cell, or nothing."""
        names = [shown.name for shown in self.shown]
        return dict(zip(names, self.figures.get(labels, []), strict=False)).get(
            column, ""
        )

    def reason(self, row: Row, column: str) -> str:
        """Return why our value differs from the paper's; empty if nobody knows."""
        cell = f"{row.name} / {column}"
        for difference in self.differences:
            if fnmatchcase(cell, difference.where):
                return difference.text
        return ""
