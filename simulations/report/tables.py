"""Tables of a report: the summary, and how the runs were made."""

from __future__ import annotations

import statistics
from dataclasses import asdict

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.studies.run_metrics import (
    bound_of,
    completions_in,
    utility_of,
    worst_leaks,
)

from .content import Cell, Section, Table, average, number
from .curves import metric_name
from .runs import PLAIN, Group, Report

# Where a run was kept; says nothing about it.
_ELSEWHERE = {"out", "state_dir", "resume", "data_dir"}


def summary_section(report: Report) -> Section:
    """Return one row for each group: how good, how leaky, how slow."""
    attacks, completions = report.attacks, _completions(report)
    bounded = any(bound_of(run.document) is not None for run in report.runs)
    several = any(len(group.runs) > 1 for group in report.groups)
    name = metric_name(report.metric) or "utility"
    spread = ["worst", "best"] if several else []
    families = {group.family for group in report.groups}
    heads = ["defense" if len(families) > 1 else "run", "seeds", name, *spread]
    heads += [f"leak {attack}" for attack in attacks]
    heads += ["bound"] if bounded else []
    heads += [
        text.removeprefix("completion_").replace("_", " ") for text in completions
    ]
    heads += ["ms per step"]
    plain = {g.data: _step_time(g) for g in report.groups if g.family == PLAIN}
    timed = plain and len(families) > 1
    heads += ["time ratio"] if timed else []
    rows = []
    for group in report.groups:
        row = _quality(group, several) + _leaks(group, attacks, completions, bounded)
        step = _step_time(group)
        row.append(number(step * 1e3, 2))
        if timed:
            base = plain.get(group.data)
            row.append(number(step / base, 2) if base else Cell(""))
        rows.append(row)
    series = [(group.number,) for group in report.groups]
    table = Table("Summary of all runs", heads, rows, series, sortable=True)
    return Section("summary", "Summary", _summary_text(report), tables=[table])


def _summary_text(report: Report) -> str:
    text = ""
    if report.attacks:
        text = (
            "Leak: how well an attack tells the labels of a batch from the gradients, "
            "at the party to which it tells most (AUC, 0.5 is chance; of values |ρ|, 0 "
            "is chance). "
        )
    if any(len(group.runs) > 1 for group in report.groups):
        text += "Mean ± standard deviation over seeds. "
    families = {group.family for group in report.groups}
    if PLAIN in families and len(families) > 1:
        text += f"The time ratio is that of a step to '{PLAIN}' on the same data."
    return text.strip()


def _completions(report: Report) -> list[str]:
    found = (name for run in report.runs for name in completions_in(run.document))
    return list(dict.fromkeys(found))


def _quality(group: Group, several: bool) -> list[Cell]:
    values = [utility_of(run.document)[1] for run in group.runs]
    values = [value for value in values if value == value]  # NaN: not evaluated
    cells = [Cell(group.name), Cell(str(len(group.runs)), len(group.runs))]
    cells.append(average(values))
    if several:
        ends = [min(values), max(values)] if values else []
        cells += [number(end) for end in ends] or [Cell(""), Cell("")]
    return cells


def _leaks(
    group: Group, attacks: list[str], completions: list[str], bounded: bool
) -> list[Cell]:
    documents = [run.document for run in group.runs]
    leaks = [worst_leaks(document) for document in documents]
    cells = [average([leak[a] for leak in leaks if a in leak]) for a in attacks]
    if bounded:
        bounds = [bound_of(document) for document in documents]
        cells.append(average([bound for bound in bounds if bound is not None]))
    found = [completions_in(document) for document in documents]
    cells += [average([f[c] for f in found if c in f]) for c in completions]
    return cells


def _step_time(group: Group) -> float:
    # The first run of a process is slow, which a median does not mind.
    times = [float(run.document["seconds"]["step"]) for run in group.runs]
    return statistics.median(times)


def settings_section(report: Report) -> Section:
    """Return the settings of the runs and the versions of what ran them."""
    defaults = asdict(RunConfig())
    configs = [run.document["config"] for run in report.runs]
    names = [name for name in configs[0] if name not in _ELSEWHERE]
    chosen: list[list[Cell]] = []
    usual: list[list[Cell]] = []
    for name in names:
        values = list(dict.fromkeys(str(config.get(name)) for config in configs))
        row = [Cell(name), Cell(_few(values))]
        changed = values != [str(defaults.get(name))]
        (chosen if changed else usual).append(row)
    engines = dict.fromkeys(str(run.document["engine"]) for run in report.runs)
    chosen.append([Cell("engine"), Cell(", ".join(engines))])
    heads = ["setting", "value"]
    tables = [
        Table("What was chosen", heads, chosen),
        Table("Versions", ["package", "version"], _versions(report)),
        Table("Settings left at their defaults", heads, usual, folded=True),
    ]
    return Section("settings", "Settings and versions", tables=tables)


def _few(values: list[str], most: int = 12) -> str:
    shown = [value or "(empty)" for value in values[:most]]
    more = f", and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(shown) + more


def _versions(report: Report) -> list[list[Cell]]:
    found: dict[str, dict[str, None]] = {}
    for run in report.runs:
        for name, version in run.document["versions"].items():
            found.setdefault(str(name), {})[str(version)] = None
    return [[Cell(name), Cell(", ".join(v))] for name, v in found.items()]
