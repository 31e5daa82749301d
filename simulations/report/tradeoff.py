"""The trade-off of privacy against utility, defense by defense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flower_vfl.simulations.studies.run_metrics import (
    is_regression,
    utility_of,
    worst_leaks,
)
from flower_vfl.simulations.studies.tradeoff import area, privacy, staircase, usefulness

from .axes import span
from .content import Cell, Figure, Section, Table, number
from .curves import metric_name
from .plots import Axes, Curve, line_plot
from .runs import Group, Report


@dataclass(frozen=True)
class _Point:
    group: Group
    x: float
    y: float
    tip: str


def tradeoff_section(report: Report) -> Section | None:
    """Return how much utility each defense leaves at how much privacy.

    None for a study that compares something else.
    """
    if report.kind == "scale":
        return None
    key, title = "tradeoff", "Privacy against utility"
    points = [point for group in report.groups if (point := _point(group))]
    if not points:
        missing = "This needs runs with score attacks (--attack) and an evaluation."
        return Section(key, title, missing=missing)
    families: dict[str, list[_Point]] = {}
    for point in points:
        family, data = point.group.family, point.group.data
        name = f"{family} ({data})" if data else family
        families.setdefault(name, []).append(point)
    low, high = span([point.y for point in points])
    ends = max(low, -0.02), min(high, 1.02)
    curves = [c for name, own in families.items() for c in _curves(name, own, ends[0])]
    axes = Axes("privacy", "utility", (-0.02, 1.02), ends)
    scene = line_plot(title, curves, axes)
    legend = [(point.group.name, point.group.style) for point in points]
    text = (
        "Privacy is 2·(1 − a), where a is the leak AUC of the attack that finds most "
        "(of values, 1 − |ρ|): 1 if no attack does better than a coin, 0 if one tells "
        "all labels. Utility is 2·(AUC − 0.5), the accuracy, or ρ. Both are means over "
        "seeds. A line is the utility that one can have at that privacy or more; its "
        "area, from 0 to 1, ranks defenses for which equally many settings were tried."
    )
    figure = Figure("tradeoff", scene, "Right and up is better", legend)
    return Section(key, title, text, [figure], [_areas(families)])


def _point(group: Group) -> _Point | None:
    documents = [run.document for run in group.runs]
    metric, _ = utility_of(documents[0])
    found: dict[str, list[float]] = {}
    for document in documents:
        for attack, leak in worst_leaks(document).items():
            if "@" not in attack:
                found.setdefault(attack, []).append(leak)
    utility = fmean([utility_of(document)[1] for document in documents])
    if not found or not math.isfinite(utility):
        return None
    leaks = {attack: fmean(values) for attack, values in found.items()}
    x = privacy(leaks, is_regression(documents[0]))
    y = usefulness(metric, utility)
    listed = ", ".join(f"{attack} {leak:.3f}" for attack, leak in leaks.items())
    tip = f"{group.name}: privacy {x:.2f}, utility {y:.2f}"
    return _Point(group, x, y, f"{tip} ({metric_name(metric)} {utility:.3f}; {listed})")


def _curves(name: str, points: Sequence[_Point], bottom: float) -> list[Curve]:
    """Return the marks of a family and, if it has several, the line through them."""
    curves = []
    if len(points) > 1:
        x, y = stairs([(point.x, point.y) for point in points])
        series = tuple(point.group.number for point in points)
        curves.append(Curve(name, x, y, points[0].group.style, series))
    for point in points:
        group = point.group
        marks = [point.x], [max(point.y, bottom)], group.style, (group.number,)
        curves.append(Curve(group.name, *marks, [point.tip]))
    return curves


def stairs(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the corners of the line of what can be had at a privacy or more."""
    x, y, before = [], [], 0.0
    for right, height in staircase(points):
        x += [before, right]
        y += [height, height]
        before = right
    return x, y


def _areas(families: dict[str, list[_Point]]) -> Table:
    areas = {
        name: area([(point.x, point.y) for point in points])
        for name, points in families.items()
    }
    ranked = sorted(areas, key=lambda name: -areas[name])
    rows = [
        [
            Cell(name),
            number(areas[name]),
            Cell(str(len(families[name])), len(families[name])),
        ]
        for name in ranked
    ]
    series = [tuple(p.group.number for p in families[name]) for name in ranked]
    heads = ["defense", "area", "settings"]
    return Table("Area under the curve", heads, rows, series, sortable=True)
