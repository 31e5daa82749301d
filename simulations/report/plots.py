"""The kinds of charts: lines, points of several classes, bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .axes import LEFT, RIGHT, Scale, frame, shown, span
from .scene import Bar, Item, Line, Marks, Scene, Style, Text

BarOf = tuple[str, float, float, Style, int]
LEGEND_ROW = 18.0
_MOST_CLASSES = 7  # as many as there are shapes; the others share one


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style
    series: tuple[int, ...]
    tips: Sequence[str] = ()
    joined: bool = True


@dataclass(frozen=True)
class Axes:
    """What a line chart shows along its axes."""

    x: str
    y: str
    x_span: tuple[float, float] | None = None
    y_span: tuple[float, float] | None = None
    log_x: bool = False
    whole_x: bool = False
    level: float | None = None
    diagonal: bool = False


def line_plot(title: str, curves: Sequence[Curve], axes: Axes) -> Scene:
    """Return a chart of lines."""
    scene = Scene(title)
    across = axes.x_span or span((v for c in curves for v in c.x), 0.02)
    if axes.log_x:
        across = across[0] / 1.1, across[1] * 1.1
    values = [v for c in curves for v in c.y]
    up = axes.y_span or span(values + ([] if axes.level is None else [axes.level]))
    names = (axes.x, axes.y)
    x, y = frame(scene, across, up, names, axes.log_x, axes.whole_x)
    if axes.level is not None:
        at = y(axes.level)
        scene.items.append(
            Line(((x.start, at), (x.end, at)), Style("soft", dash=(2, 2)))
        )
    if axes.diagonal:
        ends = ((x.start, y.start), (x.end, y.end))
        scene.items.append(Line(ends, Style("soft", dash=(2, 2))))
    for curve in curves:
        scene.items += _curve(curve, x, y)
    return scene


def _curve(curve: Curve, x: Scale, y: Scale) -> list[Item]:
    known = [
        (x(a), y(b), n)
        for n, (a, b) in enumerate(zip(curve.x, curve.y, strict=True))
        if math.isfinite(a) and math.isfinite(b)
    ]
    points = tuple((a, b) for a, b, _ in known)
    items: list[Item] = []
    if not points:
        return items
    if curve.joined and len(points) > 1:
        name = "" if curve.tips else curve.name
        items.append(Line(points, curve.style, 1.8, curve.series, name))
    if curve.tips or len(points) == 1:
        tips = curve.tips or [f"{curve.name}: {shown(v)}" for v in curve.y]
        told = tuple(tips[n] for _, _, n in known)
        series = curve.series
        if len(series) == len(curve.x):
            series = tuple(series[n] for _, _, n in known)
        items.append(Marks(points, curve.style, 4.5, 1.0, series, told))
    return items


def class_plot(
    title: str,
    points: NDArray[np.floating],
    classes: NDArray[np.integer],
    names: tuple[str, str],
    ticks: bool = False,
) -> Scene:
    """Return points of several classes, each of its own shape and colour."""
    scene = Scene(title, 300, 262)
    x, y = frame(
        scene,
        span(points[:, 0].tolist()),
        span(points[:, 1].tolist()),
        names,
        ticks=ticks,
    )
    scene.scales = {}  # nobody reads one of so many values
    for number in np.unique(classes):
        chosen = points[classes == number]
        places = tuple((x(float(a)), y(float(b))) for a, b in chosen)
        scene.items.append(Marks(places, class_style(int(number)), 2.6, 0.75))
    return scene


def class_style(number: int) -> Style:
    """Return how a class is drawn."""
    # Not the ink: the first two classes are blue circles and orange squares.
    return Style.number(1 + number % (_MOST_CLASSES - 1), number)


def bar_plot(
    title: str,
    bars: Sequence[BarOf],
    name: str,
) -> Scene:
    """Return bars that lie, each below its own name."""
    row = 34.0
    scene = Scene(title, height=46 + row * len(bars))
    most = (
        max((length + spread for _, length, spread, _, _ in bars), default=1.0) or 1.0
    )
    left = 12.0
    x = Scale(0.0, most * 1.02, left, scene.width - RIGHT)
    bottom = scene.height - 36
    for value in x.ticks():
        scene.items.append(Line(((x(value), 8), (x(value), bottom))))
        scene.items.append(Text(x(value), bottom + 14, shown(value), 11, colour="soft"))
    for place, (label, length, spread, style, series) in enumerate(bars):
        top, own = 8 + row * place, (series,)
        tip = f"{label}: {shown(length)}" + (f" ± {shown(spread)}" if spread else "")
        scene.items.append(Text(left, top + 12, _cut(tip, 62), 12, "start", series=own))
        scene.items.append(
            Bar(left, top + 17, x(length) - left, 11, style.colour, own, tip)
        )
        if spread:
            ends = (
                (x(max(length - spread, 0)), top + 22.5),
                (x(length + spread), top + 22.5),
            )
            scene.items.append(Line(ends, Style("soft"), 2.0, own))
    scene.items.append(Text((LEFT + x.end) / 2, scene.height - 6, name, 12))
    return scene


def with_legend(scene: Scene, entries: Sequence[tuple[str, Style]]) -> Scene:
    """Return a chart with its legend below, for a picture that stands alone."""
    items = list(scene.items)
    for number, (name, style) in enumerate(entries):
        y = scene.height + LEGEND_ROW * (number + 0.5)
        items.append(Line(((16.0, y), (44.0, y)), style, 1.8))
        items.append(Marks(((30.0, y),), style, 4.5))
        items.append(Text(52, y + 4, _cut(name, int(scene.width / 7) - 8), 12, "start"))
    height = scene.height + LEGEND_ROW * len(entries) + (6 if entries else 0)
    return Scene(scene.title, scene.width, height, items)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
