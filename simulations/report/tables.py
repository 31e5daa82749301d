"""Tables of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import pandas as pd

from flower_vfl.simulations.config import RunConfig, parts
from flower_vfl.simulations.papers.experiments import experiment_names, load_experiment
from flower_vfl.simulations.papers.reproduce import KIND, cells_of, measured
from flower_vfl.simulations.results import RUN
from flower_vfl.simulations.studies import run_metrics
from flower_vfl.simulations.studies.study import Study
from flower_vfl.simulations.studies.tradeoff import area

from .data import PLAIN, Report

Cell = tuple[str, float | None]  # what is written, and the number that it is sorted by
# Where a run was kept; says nothing about it.
_ELSEWHERE = {"out", "state_dir", "resume", "data_dir"}
_FILES = {"label_party", "passive", "nodes", "certificate", "private_key"}
_FILES |= {"root_certificate"}  # shown without their folders: a report may be mailed


@dataclass(frozen=True)
class Table:
    """A table; `settings` are those of each row, for the page's filters."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    settings: Sequence[Sequence[str]] = ()
    folded: bool = False
    parties: Sequence[str] = ()  # of each row, for the page's filters


def number(value: float, digits: int = 3) -> Cell:
    """Return a number as a cell, which is empty for NaN."""
    return ("", None) if isnan(value) else (f"{value:.{digits}f}", float(value))


def average(values: pd.Series[float]) -> Cell:
    """Return mean and, of several values, standard deviation as a cell."""
    text, mean = number(float(values.mean()))
    sd = float(values.std())
    return (text if isnan(sd) else f"{text}\n±{sd:.3f}"), mean


def summary_table(report: Report) -> Table:
    """Return a row for each setting: how good, how leaky, how slow."""
    runs, utility = report.runs, report.utility["value"]
    columns = {f"leak {name}": report.largest_leaks[name] for name in report.attacks}
    bounds = run_metrics.bounds(report.records)
    columns |= {"bound": bounds} if len(bounds) else {}
    for name, values in run_metrics.over_training(report.records).items():
        columns[run_metrics.WHOLE_RUN[str(name)]] = values
    found = run_metrics.completions(report.records)
    for (attack, split), own in found.groupby(["attack", "split"], sort=False):
        columns[f"{attack} {split}"] = own.set_index(RUN)["value"]
    several = len(runs) > len(report.settings)
    defenses = runs["family"].nunique() > 1
    times = runs.groupby("setting", sort=False)["milliseconds"].median()
    plain = report.settings[report.settings["family"] == PLAIN]
    base = dict(zip(plain["data"], times[plain.index], strict=True))
    timed = bool(base) and defenses
    heads = ["defense" if defenses else "run", "seeds", report.metric_name]
    heads[2] += ", worst–best" if several else ""
    heads += [*columns, "ms per step", *(["time ratio"] if timed else [])]
    rows = []
    for setting, own in report.by_setting():
        values = utility.reindex(own.index)
        text, mean = number(values.mean())
        text += f"\n{values.min():.3f}–{values.max():.3f}" if len(own) > 1 else ""
        text += "".join(f"\n{why}" for why in own["untrained"].unique() if why)
        row: list[Cell] = [(setting, None), number(len(own), 0), (text, mean)]
        row += [average(found.reindex(own.index)) for found in columns.values()]
        row.append(number(times[setting], 2))
        if timed:
            row.append(number(times[setting] / base.get(own["data"].iloc[0], nan), 2))
        rows.append(row)
    settings = [[name] for name in times.index]
    return Table("Summary of all runs", heads, rows, settings)


def area_table(points: pd.DataFrame) -> Table:
    """Return the area under the trade-off of each defense."""
    rows = []
    for name, own in points.groupby("curve", sort=False):
        size = area(list(zip(own["privacy"], own["usefulness"], strict=True)))
        rows.append((size, str(name), list(own["setting"])))
    rows.sort(key=lambda row: -row[0])
    cells = [[(n, None), number(size), number(len(own), 0)] for size, n, own in rows]
    heads = ["defense", "area", "settings"]
    return Table("Area under the curve", heads, cells, [own for *_, own in rows])


def calibration_table(found: Mapping[str, Sequence[float]]) -> Table:
    """Return the calibration error of each setting, and of how many rows it is."""
    rows = [[(n, None), number(error), number(c, 0)] for n, (error, c) in found.items()]
    heads = ["defense", "ACE", "rows"]
    return Table("Adaptive calibration error", heads, rows, [[n] for n in found])


def privacy_table(report: Report) -> Table:
    """Return what each setting promises about labels over the whole training."""
    rows: list[list[Cell]] = []
    for setting, promised in report.settings["promised"].items():
        scopes = [each.scope for each in (promised, *promised.others) if each.scope]
        texts = [str(setting), promised.sentence, "; ".join(scopes)]
        rows.append([(text, None) for text in texts])
    heads = ["defense", "promise", "holds"]
    settings = [[str(name)] for name in report.settings.index]
    return Table("What is promised about a label", heads, rows, settings)


def paper_table(study: Study) -> Table:
    """Return the figures of the paper that a study repeats, beside ours."""
    columns = [str(column) for column in study.extra.get("columns", ())]
    ours = _our_figures(study)
    theirs = {tuple(row["labels"]): row["figures"] for row in study.extra["paper"]}
    nothing = [""] * len(columns)
    rows = []
    for labels in dict.fromkeys([*theirs, *ours]):
        row: list[Cell] = [(" / ".join(map(str, labels)), None)]
        own, paper = ours.get(labels, nothing), theirs.get(labels, nothing)
        for mine, printed in zip(own, paper, strict=False):
            row += [(str(mine), None)] if ours else []
            row.append((str(printed), None))
        rows.append(row)
    who = ("ours", "paper") if ours else ("paper",)
    heads = [f"{column}, {one}" for column in columns for one in who]
    return Table("The paper's figures", ["row", *heads], rows)


def _our_figures(study: Study) -> dict[tuple[str, ...], list[str]]:
    """Return what a study found, in the cells of the paper's table."""
    name = study.extra.get("name")
    if study.kind != KIND or name not in experiment_names():
        return {}
    experiment = load_experiment(name, bool(study.extra.get("quick")))
    found = cells_of(experiment, measured(experiment, study, study.extra.get("seeds")))
    return {labels: [cell.text for cell in cells] for labels, cells in found.items()}


def settings_tables(report: Report) -> list[Table]:
    """Return the settings of the runs and the versions of what ran them."""
    documents = pd.DataFrame(list(report.documents.values()))
    configs = _distinct(documents["config"])
    configs |= {n: [*map(_file_names, configs[n])] for n in _FILES & configs.keys()}
    versions = _distinct(documents["versions"])
    defaults = {name: [str(value)] for name, value in asdict(RunConfig()).items()}
    names = [name for name in configs if name not in _ELSEWHERE]
    chosen = {n: configs[n] for n in names if configs[n] != defaults.get(n)}
    chosen["engine"] = [str(engine) for engine in documents["engine"].unique()]
    usual = {n: configs[n] for n in names if n not in chosen}
    heads = ["setting", "value"]
    return [
        Table("What was chosen", heads, _listed(chosen)),
        Table("Versions", ["package", "version"], _listed(versions)),
        Table("Settings left at their defaults", heads, _listed(usual), folded=True),
    ]


def _file_names(paths: str) -> str:
    return ", ".join(Path(path).name for path in parts(paths))


def _distinct(mappings: pd.Series[Any]) -> dict[str, list[str]]:
    """Return the different values of every name."""
    frame = pd.DataFrame(list(mappings), dtype=object)
    return {str(n): list(frame[n].dropna().map(str).unique()) for n in frame}


def _listed(values: Mapping[str, list[str]], most: int = 12) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for name, found in values.items():
        more = f", and {len(found) - most} more" if len(found) > most else ""
        text = ", ".join(value or "(empty)" for value in found[:most]) + more
        rows.append([(name, None), (text, None)])
    return rows
