"""What was measured along a setting that takes several numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean

from flower_vfl.simulations.studies.run_metrics import (
    is_regression,
    leaks_of,
    utility_of,
    worst_leaks,
)

from .axes import shown
from .content import Figure, Section
from .curves import kilobytes, leak_span, metric_name, milliseconds
from .plots import Axes, Curve, line_plot
from .runs import SEED, Group, Report, ReportRun
from .scene import Style

Reading = Callable[[ReportRun], float | None]
_LOG = 8.0  # a logarithmic axis from this ratio of the ends on


def setting_section(report: Report) -> Section | None:
    """Return leak, utility and cost along a setting; None if there is no such setting."""
    label = _numeric_label(report)
    if not label:
        return None
    figures: list[Figure] = []
    looks: dict[str, Style] = {}
    for name, read in _readings(report).items():
        curves = _curves(report, label, read)
        if not curves:
            continue
        ends = [x for curve in curves for x in curve.x]
        low, high = min(ends), max(ends)
        log = low > 0 and high / low > _LOG
        axes = Axes(label, name, (low, high) if log else None, log_x=log)
        if "leak AUC" in name:
            values = [y for curve in curves for y in curve.y]
            axes = replace(axes, y_span=leak_span(values), level=0.5)
        scene = line_plot(f"{name} by {label}", curves, axes)
        legend = [(curve.name, curve.style) for curve in curves]
        looks |= dict(legend)
        figures.append(Figure(f"by-{label}-{name}", scene, name, legend))
    text = f"Means over seeds; every point is one value of {label}."
    lines = list(looks.items()) if len(looks) > 1 else []
    return Section("setting", f"Along {label}", text, figures, legend=lines)


def _readings(report: Report) -> dict[str, Reading]:
    leak = "|ρ|" if is_regression(report.runs[0].document) else "leak AUC"
    found: dict[str, Reading] = {metric_name(report.metric): _utility}
    for attack in report.attacks:
        found[f"largest {leak}, {attack}"] = partial(_worst, attack)
        found[f"mean {leak}, {attack}"] = partial(_mean, attack)
        found[f"{leak} of a coalition, {attack}"] = partial(_together, attack)
    return found | {
        "ms per step": milliseconds,
        "kB per step": lambda run: kilobytes(run) or None,
        "MB at the peak": _megabytes,
    }


def _utility(run: ReportRun) -> float | None:
    value = utility_of(run.document)[1]
    return value if math.isfinite(value) else None


def _worst(attack: str, run: ReportRun) -> float | None:
    return worst_leaks(run.document).get(attack)


def _mean(attack: str, run: ReportRun) -> float | None:
    parties = leaks_of(run.document).get(attack, {})
    single = [leak for name, leak in parties.items() if not {"+", "/"} & set(name)]
    return fmean(single) if single else None


def _together(attack: str, run: ReportRun) -> float | None:
    parties = leaks_of(run.document).get(attack, {})
    found = [leak for name, leak in parties.items() if "+" in name and "/" not in name]
    return max(found, default=None)


def _megabytes(run: ReportRun) -> float | None:
    peak = run.document.get("memory", {}).get("peak")
    return float(peak) / 1e6 if peak else None


def _numeric_label(report: Report) -> str:
    """Return the one label whose values are three numbers or more."""
    names = dict.fromkeys(name for run in report.runs for name in run.labels)
    found = []
    for name in names:
        values = {run.labels.get(name, "") for run in report.runs}
        if name != SEED and len(values) > 2 and all(map(is_number, values)):
            found.append(name)
    return found[0] if len(found) == 1 else ""


def is_number(text: str) -> bool:
    """Return whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _curves(report: Report, label: str, read: Reading) -> list[Curve]:
    """Return one line for all groups that differ in the label only."""
    lines: dict[str, list[tuple[float, float, Group]]] = {}
    for group in report.groups:
        labels = group.runs[0].labels
        found = [value for run in group.runs if (value := read(run)) is not None]
        if found and label in labels:
            others = [v for n, v in labels.items() if n not in (label, SEED)]
            name = ", ".join(others) or group.family
            point = float(labels[label]), fmean(found), group
            lines.setdefault(name, []).append(point)
    curves = []
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        tips = [f"{group.name}: {shown(y)}" for _, y, group in points]
        series = tuple(group.number for _, _, group in points)
        x, y = [p[0] for p in points], [p[1] for p in points]
        curves.append(Curve(name, x, y, points[0][2].style, series, tips))
    return curves
