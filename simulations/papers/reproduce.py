"""Runs of a paper's table, and our values in its cells beside the paper's own."""

from __future__ import annotations

import math
import re
import shutil
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.results import RESULT_FILE, read_json, table
from flower_vfl.simulations.studies.study import RUNS_FOLDER, Study, run_study
from flower_vfl.simulations.studies.trials import Trial

from .cell_metrics import DERIVED, READINGS, Found, seconds
from .experiments import PAPERS, Claim, Column, Experiment, Row

KIND = "reproduce"
RESULTS = PAPERS / "results"
# Columns of a table's values, beside the labels and the values themselves.
SEED, RUN, SECONDS = "seed", "run", "seconds"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
Agreement = Literal["alike", "differs", "undecided"]
Says = Literal["held", "missed", "undecided", ""]
_ERRORS = 2.0  # standard errors within which nothing is decided
# Standard deviation of the largest of 1, 2, ... 10 normal values with deviation 1
_EXTREME = (1.0, 0.826, 0.748, 0.701, 0.669, 0.645, 0.626, 0.611, 0.598, 0.587)


def trials_of(experiment: Experiment, seeds: int | None = None) -> list[Trial]:
    """Return the runs of a table; rows with the same settings share theirs."""
    trials: dict[Any, Trial] = {}
    for trial in _planned(experiment, seeds):
        trials.setdefault(trial.config, trial)
    return list(trials.values())


def _planned(experiment: Experiment, seeds: int | None) -> Iterator[Trial]:
    """Yield a trial for each row and seed."""
    for row in experiment.rows:
        for seed in range(0 if row.config is None else seeds or row.seeds):
            yield _trial(experiment, row, seed)


def _trial(experiment: Experiment, row: Row, seed: int) -> Trial:
    assert row.config is not None  # a row that can be run
    labels = dict(zip(experiment.axes, row.labels, strict=True)) | {SEED: str(seed)}
    return Trial(labels, replace(row.config, seed=seed))


def run_experiment(
    experiment: Experiment,
    folder: Path,
    seeds: int | None = None,
    workers: int = 1,
    quick: bool = False,
    bar: bool = True,
    saved: pd.DataFrame | None = None,
) -> Study:
    """Run what a table and its `saved` results lack; take over runs of other tables."""
    trials = trials_of(experiment, seeds)
    if not trials:
        raise ConfigError(f"'{experiment.name}' has no row that can be run here")
    if saved is not None and not saved.empty:
        trials = [each for each in trials if each.digest not in set(saved[RUN])]
        if not trials:
            return Study(folder, KIND, experiment.full_title)
    for trial in trials:
        _take_over(trial, folder)
    extra = {"name": experiment.name, "quick": quick, "seeds": seeds}
    extra |= {"note": experiment.about["data"]}
    printed = experiment.figures.items()
    extra["paper"] = [{"labels": list(own), "figures": each} for own, each in printed]
    extra["columns"] = [column.name for column in experiment.shown]
    title = experiment.full_title + (" (smoke run)" if quick else "")
    return run_study(folder, KIND, title, trials, workers=workers, bar=bar, extra=extra)


def _take_over(trial: Trial, folder: Path) -> None:
    """Copy the run of a table beside this one, if it has the same settings."""
    own = folder / RUNS_FOLDER / trial.key
    if (own / RESULT_FILE).is_file():
        return
    pattern = f"*/{RUNS_FOLDER}/*-{trial.digest}/{RESULT_FILE}"
    for found in sorted(folder.parent.glob(pattern)):
        if trial.made(read_json(found) or {}):
            shutil.copytree(found.parent, own, dirs_exist_ok=True)
            return


def measured(
    experiment: Experiment, study: Study, seeds: int | None = None
) -> pd.DataFrame:
    """Return one line for each finished row and seed: labels, seed, values."""
    made = [trial for trial in study.trials if trial["key"] in study.documents]
    known = {trial["digest"]: trial["key"] for trial in made}
    lines = []
    for trial in _planned(experiment, seeds):
        if (key := known.get(trial.digest)) is not None:
            found = Found(table(study.documents[key]), study.run_folder(key))
            line = {SEED: trial.config.seed, RUN: trial.digest}
            line[SECONDS] = seconds(found, "total")
            lines.append({**trial.labels, **line, **_read(experiment, found)})
    names = [column.name for column in experiment.columns]
    return pd.DataFrame(lines, columns=[*experiment.axes, SEED, RUN, SECONDS, *names])


def _read(experiment: Experiment, found: Found) -> dict[str, float]:
    values: dict[str, float] = {}
    for known, source in ((READINGS, found), (DERIVED, values)):
        for column in experiment.columns:
            if column.reading in known:
                read = known[column.reading]
                values[column.name] = read(source, **column.arguments)
    return values


def saved_results(experiment: Experiment, folder: Path | None = None) -> pd.DataFrame:
    """Return the values of a table that are kept with the package."""
    path = (folder or RESULTS) / f"{experiment.name}.csv"
    if not path.is_file():
        return pd.DataFrame()
    return pd.read_csv(path, dtype=dict.fromkeys([*experiment.axes, RUN], str))


def add_saved(
    experiment: Experiment, frame: pd.DataFrame, saved: pd.DataFrame
) -> pd.DataFrame:
    """Return values with those of other saved runs whose settings have not changed."""
    if saved.empty:
        return frame
    done, names = set(frame[RUN]), [*experiment.axes, SEED]
    others = [each for each in _planned(experiment, None) if each.digest not in done]
    rows = [(*each.labels.values(), each.digest) for each in others]
    values = saved.drop(columns=names).drop_duplicates(RUN)  # which rows may share
    other = pd.DataFrame(rows, columns=[*names, RUN]).astype({SEED: int})
    other = other.merge(values, on=RUN).reindex(columns=frame.columns)
    both = pd.concat([frame, other]) if len(frame) else other
    order = {row.labels: place for place, row in enumerate(experiment.rows)}
    labels = both[[*experiment.axes]].itertuples(index=False, name=None)
    both = both.assign(place=[order[own] for own in labels])
    return both.sort_values(["place", SEED]).drop(columns="place")


def save_results(
    experiment: Experiment, frame: pd.DataFrame, folder: Path | None = None
) -> Path:
    """Keep the values of a table, six digits each."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{experiment.name}.csv"
    frame.to_csv(path, index=False, float_format="%.6g")
    return path


def outdated(experiment: Experiment, frame: pd.DataFrame) -> list[str]:
    """Return the rows whose settings have changed since they were run."""
    rows = {row.labels: row for row in experiment.rows}
    changed = {}
    for line in frame.to_dict("records"):
        labels = tuple(line[axis] for axis in experiment.axes)
        row = rows.get(labels)
        if row is None or row.config is None:
            changed[" / ".join(labels)] = True
        elif line[RUN] != _trial(experiment, row, int(line[SEED])).digest:
            changed[row.name] = True
    return list(changed)


@dataclass(frozen=True)
class Cell:
    """One of our values beside the paper's."""

    values: tuple[float, ...]
    column: Column
    paper: str
    seeds: tuple[int, ...] = ()

    @property
    def value(self) -> float | None:
        """What is shown: the mean, smallest or largest value over the seeds."""
        if not self.values:
            return None
        if self.column.seeds == "mean":
            return statistics.fmean(self.values)
        return (min if self.column.seeds == "min" else max)(self.values)

    @cached_property
    def deviation(self) -> float | None:
        """The standard deviation of a run; None for a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float:
        """The standard error of the value, as of normal ones; infinite for one seed."""
        if self.deviation is None:
            return math.inf
        runs = len(self.values)
        if self.column.seeds == "mean":
            return self.deviation / math.sqrt(runs)
        return self.deviation * _EXTREME[min(runs, len(_EXTREME)) - 1]

    @property
    def text(self) -> str:
        """The value as it is shown."""
        if self.value is None:
            return ""
        digits = self.column.digits
        sign = "%" if self.column.how == "percent" and self.column.beside else ""
        text = f"{self.value:.{digits}f}{sign}"
        if self.deviation is not None and self.column.seeds == "mean":
            text += f" ± {self.error:.{digits}f}"
        return text

    def verdict(self, tolerance: float) -> Agreement | None:
        """Compare our value with the paper's; None where one of them is missing.

        They differ if they are further apart than the tolerance and than two standard
        errors of their difference. They are alike if they are closer than the
        tolerance, or than the deviation that the paper prints, and two standard errors
        of ours are smaller than that too.
        """
        numbers = [float(n) for n in _NUMBER.findall(self.paper.replace("−", "-"))]
        if self.value is None or not numbers:
            return None
        printed = numbers[1] if "±" in self.paper else None
        apart, allowed = abs(self.value - numbers[0]), max(tolerance, printed or 0.0)
        ours = self.error if math.isfinite(self.error) else 0.0
        # A paper without deviations may print a single run, as uncertain as one of ours
        theirs = (self.deviation or 0.0) if printed is None else printed
        if apart > max(tolerance, _ERRORS * math.hypot(ours, theirs)):
            return "differs"
        close = apart <= allowed and _ERRORS * self.error <= allowed
        return "alike" if close else "undecided"


Cells = Mapping[tuple[str, ...], list[Cell]]  # by the labels of a row


def cells_of(experiment: Experiment, frame: pd.DataFrame) -> Cells:
    """Return the cells of every row, one for each column that is not hidden."""
    found: dict[Any, pd.DataFrame] = {}
    if not frame.empty:
        groups = frame.groupby(list(experiment.axes), sort=False)
        found = {labels: own.set_index(SEED) for labels, own in groups}

    def cell(labels: tuple[str, ...], column: Column) -> Cell:
        values = _values(found, labels, column)
        paper = experiment.figure(labels, column.name)
        return Cell(tuple(values), column, paper, tuple(values.index))

    return {
        row.labels: [cell(row.labels, column) for column in experiment.shown]
        for row in experiment.rows
    }


def _values(
    found: Mapping[Any, pd.DataFrame], labels: tuple[str, ...], column: Column
) -> pd.Series[float]:
    """Return a cell's values by seed, compared with another row if that is asked."""
    beside = (*labels[:-1], column.beside) if column.beside else labels
    if any(column.name not in found.get(row, ()) for row in (labels, beside)):
        return pd.Series(dtype=float)  # not run, or not since the column is there
    values = found[labels][column.name] * column.scale
    if column.beside:
        other = found[beside][column.name] * column.scale
        values = compare(values, other, column.how)
    return values.dropna()


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
    """What a claim of a paper comes to with our values; `says` is empty without any."""

    own: Cell | None = None
    beside: tuple[Cell, ...] = ()
    says: Says = ""


def judge(claim: Claim, experiment: Experiment, cells: Cells) -> Verdict:
    """Return whether our values support a claim, or are too uncertain to say so."""
    names = [column.name for column in experiment.shown]
    by_name = {" / ".join(labels): row for labels, row in cells.items()}
    own, above, below = (
        by_name[row][names.index(claim.column)] if row else None
        for row in (claim.row, claim.above, claim.below)
    )
    beside = tuple(cell for cell in (above, below) if cell is not None)
    if own is None or not all(cell.values for cell in (own, *beside)):
        return Verdict()
    said = set()
    for limit, sign in ((claim.least, 1.0), (claim.most, -1.0)):
        if limit is not None:
            margin = sign * (_value(own) - limit)
            said.add(_decide(margin, own.error, True))
    for other, sign in ((above, 1.0), (below, -1.0)):
        if other is not None:
            margin = sign * (_value(own) - _value(other))
            said.add(_decide(margin, _error_between(own, other), False))
    order: tuple[Says, ...] = ("missed", "undecided", "held")
    return Verdict(own, beside, next((each for each in order if each in said), ""))


def _value(cell: Cell) -> float:
    assert cell.value is not None  # the caller looked
    return cell.value


def _error_between(one: Cell, other: Cell) -> float:
    """Return the standard error of a difference; runs with the same seed are paired."""
    paired = one.seeds == other.seeds and one.column.seeds == "mean"
    if not paired or len(one.seeds) < 2:
        return math.hypot(one.error, other.error)
    apart = [a - b for a, b in zip(one.values, other.values, strict=True)]
    return statistics.stdev(apart) / math.sqrt(len(apart))


def _decide(margin: float, error: float, equal: bool) -> Says:
    """Return what a difference says; `equal` is said of one that is exactly 0."""
    if abs(margin) > _ERRORS * error:
        return "held" if margin > 0.0 else "missed"
    if margin == error == 0.0:
        return "held" if equal else "missed"
    return "undecided"
