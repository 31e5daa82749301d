"""The tables and figures of papers as TOML files.

The rows of a table are all combinations of what its axes list. The settings of a row
are those of ``[base]``, then those of its choice on every axis,
``[choices.axis.choice]`` (or of another axis, if this one has none of the name), and in
a smoke run those of ``[quick]`` and of its choices' ``quick``, which may list fewer
``axes``; ``{name}`` stands for a value of ``let``. ``include`` names files in
``shared/`` that lie beneath. Columns say what is read from a run (`cell_metrics`).
"""

import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from itertools import chain, product
from pathlib import Path
from typing import Any

from flower_vfl.errors import ConfigError, check_name, unknown_name
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.objectives import preset

from .cell_metrics import DERIVED, READINGS

PAPERS = Path(__file__).parent
SHARED = PAPERS / "shared"
ABOUT = ("paper", "title", "shows", "data", "scaled")
OVER_SEEDS = ("mean", "min", "max")
COMPARISONS = ("ratio", "difference", "percent")
_WHOLE = re.compile(r"\{(\w+)\}")
_NO_SETTINGS = {"let", "quick", "seeds", "missing", "axes"}


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
    headline: bool = False  # one of those in the paper's abstract


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
    def full_title(self) -> str:
        """The paper and the number of the table."""
        return f"{self.about['paper']}, {self.about['title']}"

    @property
    def shown(self) -> list[Column]:
        """The columns that are not hidden."""
        return [column for column in self.columns if not column.hidden]

    def figure(self, labels: tuple[str, ...], column: str) -> str:
        """Return what the paper prints in a cell, or nothing."""
        names = [shown.name for shown in self.shown]
        printed = dict(zip(names, self.figures.get(labels, []), strict=False))
        return printed.get(column, "")

    def reason(self, row: Row, column: str) -> str:
        """Return why our value differs from the paper's; empty if nobody knows."""
        cell = f"{row.name} / {column}"
        known = (d.text for d in self.differences if fnmatchcase(cell, d.where))
        return next(known, "")


def experiment_names() -> list[str]:
    """Return the names of all tables and figures, in the order of the papers."""
    return sorted((path.stem for path in PAPERS.glob("*.toml")), key=_order)


def _order(name: str) -> tuple[Any, ...]:
    paper, kind, number = name.rsplit("-", 2)
    papers = ("marvell", "gafm", "gafm-original", "florist", "ladsg")
    return papers.index(paper), kind != "table", int(number)


def load_experiment(name: str, quick: bool = False) -> Experiment:
    """Return a table or figure by name, or of a TOML file."""
    path = Path(name) if name.endswith(".toml") else PAPERS / f"{name}.toml"
    if not path.is_file():
        raise unknown_name("table or figure", name, experiment_names())
    return read_experiment(path, quick)


def read_experiment(path: Path, quick: bool = False) -> Experiment:
    """Return the table or figure of a file."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    for shared in raw.pop("include", []):
        common = tomllib.loads((SHARED / f"{shared}.toml").read_text(encoding="utf-8"))
        raw = _merge(common, raw)
    try:
        columns = [_column(entry) for entry in raw["columns"]]
        about = {name: str(raw[name]).strip() for name in ABOUT}
        about["scaled"] = f"{about['scaled']} {raw.get('also', '')}".strip()
        experiment = Experiment(
            name=path.stem,
            about=about,
            minutes=float(raw["minutes"]),
            axes=raw["axes"],
            rows=list(_rows(raw, quick)),
            columns=columns,
            figures=dict(_figures(raw.get("figures", {}), len(raw["axes"]))),
            claims=[Claim(**entry) for entry in raw.get("claims", [])],
            differences=[Difference(**entry) for entry in raw.get("differences", [])],
            tolerance=float(raw.get("tolerance", 0.05)),
        )
        _check(experiment)
    except (ConfigError, KeyError, TypeError) as error:
        text = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"{path.name}: {text}") from error
    return experiment


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tables as one; what both have is taken from the second."""
    merged = dict(under)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


def _column(entry: Mapping[str, Any]) -> Column:
    own = {f.name for f in fields(Column)} - {"arguments"}
    arguments = {name: value for name, value in entry.items() if name not in own}
    given = {name: entry[name] for name in entry.keys() & own}
    column = Column(**given, arguments=arguments)
    known = {**READINGS, **DERIVED}
    check_name("reading", column.reading, known)
    check_name("summary of seeds", column.seeds, OVER_SEEDS)
    check_name("comparison", column.how, COMPARISONS)
    accepted = list(inspect.signature(known[column.reading]).parameters)[1:]
    for name in arguments:
        check_name(f"argument of '{column.reading}'", name, accepted)
    return column


def _rows(raw: Mapping[str, Any], quick: bool) -> Iterator[Row]:
    base, let, smoke = raw.get("base", {}), raw.get("let", {}), raw.get("quick", {})
    kept = smoke.get("axes", {}) if quick else {}
    shared = {k: v for known in raw["choices"].values() for k, v in known.items()}
    for labels in product(*raw["axes"].values()):
        choices: list[dict[str, Any]] = []
        for axis, label in zip(raw["axes"], labels, strict=True):
            known = shared | raw["choices"].get(axis, {})
            check_name(f"choice of {axis}", label, known)
            choices.append(known[label])
            if label not in kept.get(axis, [label]):
                choices.insert(0, {"missing": "left out of the smoke run"})
        if missing := next((c["missing"] for c in choices if c.get("missing")), ""):
            yield Row(labels, None, 0, missing)
            continue
        layers = [{**base, "let": let}, *choices]
        if quick:
            layers += [smoke, *(c.get("quick", {}) for c in choices)]
        seeds = min([raw["seeds"], *(c["seeds"] for c in choices if "seeds" in c)])
        yield Row(labels, _config(layers), 1 if quick else seeds)


def _config(layers: Sequence[Mapping[str, Any]]) -> RunConfig:
    """Return the settings of several layers, the last one on top, with names filled."""
    settings: dict[str, Any] = {}
    let: dict[str, Any] = {}
    for layer in layers:
        let |= layer.get("let", {})
        settings |= {k: v for k, v in layer.items() if k not in _NO_SETTINGS}
    filled = {name: _fill(value, let) for name, value in settings.items()}
    filled |= preset(filled.pop("preset")) if "preset" in filled else {}
    simulated = {"reproducible-noise": True, "device": "cpu"}
    return RunConfig.from_run_config({**simulated, **filled})


def _fill(value: Any, let: Mapping[str, Any]) -> Any:
    """Return a setting with ``{name}`` replaced; alone it keeps its type."""
    if not isinstance(value, str):
        return value
    alone = _WHOLE.fullmatch(value)
    try:
        return let[alone[1]] if alone else value.format_map(let)
    except KeyError as error:
        raise ConfigError(f"'{value}' has no value for {error}") from error


def _figures(
    raw: Mapping[str, Any], depth: int
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    for label, value in raw.items():
        if depth == 1:
            yield (label,), [str(figure) for figure in value]
        else:
            for rest, figures in _figures(value, depth - 1):
                yield (label, *rest), figures


def _check(experiment: Experiment) -> None:
    rows = {row.name for row in experiment.rows}
    names = [column.name for column in experiment.columns]
    last = list(experiment.axes.values())[-1]
    for labels, figures in experiment.figures.items():
        check_name("row of a figure", " / ".join(labels), rows)
        if len(figures) != (columns := len(experiment.shown)):
            wrong = f"{len(figures)} figures for {columns} columns"
            raise ConfigError(f"{' / '.join(labels)} has {wrong}")
    for claim in experiment.claims:
        for row in filter(None, (claim.row, claim.above, claim.below)):
            check_name("row of a claim", row, rows)
        if claim.row:
            shown = [column.name for column in experiment.shown]
            check_name("column of a claim", claim.column, shown)
    for column in experiment.columns:
        if column.beside:
            check_name("row to compare with", column.beside, last)
        if column.reading in DERIVED:
            for other in chain.from_iterable(column.arguments.values()):
                check_name("column", other, names)
