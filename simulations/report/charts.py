"""Charts of a report: functions from a DataFrame to an Altair chart.

A column ``setting`` holds what the page's filters hide; ``hidden`` is their parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

# Okabe and Ito's palette for all kinds of colour vision; yellow is lost on paper.
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6")
_NAMES = ("ink", "soft", "grid", "paper", *SERIES)
_LIGHT = "#1a1a1a #5b5b5b #dddddd #ffffff"
_LIGHT += " #1a1a1a #0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9"
_DARK = "#ececec #a8a8a8 #3a3a3a #191919"
_DARK += " #ececec #4aa3df #ff8433 #1fc795 #cc79a7 #e69f00 #9fd8ff"
COLOURS = dict(zip(_NAMES, _LIGHT.split(), strict=True))
DARK = dict(zip(_NAMES, _DARK.split(), strict=True))
SHAPES: tuple[str, ...] = ("circle", "square", "triangle-up", "diamond", "cross")
SHAPES += ("triangle-down", "triangle-right")
DASHES = ([1, 0], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [12, 4], [6, 2, 2, 2, 2, 2])
_DOTTED = [2, 2]
_LEGEND: dict[str, Any] = {"orient": "bottom", "symbolLimit": 200}
_SHORT, _MANY = 20, 8  # a legend of at most 8 names with more letters has one column
# Pixels of the trade-off chart and of a letter; side of a point, and lines below it.
_WIDTHS, _HEIGHT, _LETTER = (300, 450, 650), 300, 6.2
_BESIDE = [(1, 0), (-1, 0), *((side, n) for n in (-1, 1, -2, 2) for side in (0, 1, -1))]
_LEAKS = ["#fff6ec", "#f6a35c", "#9c3203"]  # one hue: for all kinds of colour vision
_SCORES = ["#f2f7fd", "#6fadd9", "#084c94"]
_STROKES = {"symbolType": "stroke", "symbolSize": 400}
_UNHIDDEN = "indexof(hidden, datum.setting) < 0"
_WHEEL = "wheel![event.shiftKey || event.ctrlKey]"  # a plain wheel scrolls the page
# A text mark beside its point, from the columns of `labels_beside`.
BESIDE: dict[str, Any] = {"dy": alt.expr("datum.down")}
BESIDE["dx"] = alt.expr("datum.side * 9")
BESIDE["align"] = alt.expr("datum.side ? datum.side < 0 ? 'right' : 'left' : 'center'")
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Figure:
    """A chart, with what the page's filters know it by."""

    name: str
    chart: alt.Chart | alt.LayerChart
    caption: str
    setting: str = ""
    attack: str = ""
    party: str = ""


def css(name: str) -> str:
    """Return a colour as a CSS variable, which follows the reader's colour scheme."""
    return f"var(--{name})"


def with_colours(spec: Any, colours: Mapping[str, str]) -> Any:
    """Return a specification with colours in place of CSS variables."""
    if isinstance(spec, dict):
        return {key: with_colours(value, colours) for key, value in spec.items()}
    if isinstance(spec, list):
        return [with_colours(value, colours) for value in spec]
    known = {css(name): value for name, value in colours.items()}
    return known.get(spec, spec) if isinstance(spec, str) else spec


def theme() -> dict[str, Any]:
    """Return the Vega-Lite config that all charts share."""
    shared: dict[str, Any] = json.loads((TEMPLATES / "theme.json").read_text("utf-8"))
    return shared


def specification(chart: alt.Chart | alt.LayerChart) -> dict[str, Any]:
    """Return a chart for Vega-Lite, without the config that all charts share."""
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = chart.to_dict(validate=False)
    spec.pop("config", None)
    return spec


def svg(spec: dict[str, Any], config: dict[str, Any]) -> str:
    """Return a picture of a specification, drawn by the Vega-Lite of Altair."""
    drawn: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=config)
    return drawn


@dataclass(frozen=True)
class Look:
    """Colour, shape and dash of each value of a field."""

    field: str
    names: Sequence[str]
    colours: Sequence[int]
    shapes: Sequence[int]

    def only(self, names: Iterable[str]) -> Look:
        """Return the looks of some of the values."""
        chosen = set(names)
        kept = [n for n, name in enumerate(self.names) if name in chosen]
        looks = self.names, self.colours, self.shapes
        return Look(self.field, *([own[n] for n in kept] for own in looks))  # type: ignore[arg-type]

    def colour(self, field: str = "", legend: Mapping[str, Any] = _LEGEND) -> alt.Color:
        """Return the colour channel; all layers of a chart need the same legend."""
        values = [css(SERIES[n % len(SERIES)]) for n in self.colours]
        longest = max(map(len, self.names), default=0)
        short = longest <= _SHORT or len(self.names) > _MANY
        size = {"columns": 2 if short else 1, "labelLimit": 140 if short else 280}
        shown = alt.Legend(**{**_LEGEND, **size, **legend})
        scale = self._scale(values)
        name = f"{field or self.field}:N"
        return alt.Color(name, title=None, scale=scale, legend=shown)

    def shape(self) -> alt.Shape:
        """Return the shape channel of points."""
        values = [SHAPES[n % len(SHAPES)] for n in self._turns()]
        return alt.Shape(f"{self.field}:N", title=None, scale=self._scale(values))

    def dash(self) -> alt.StrokeDash:
        """Return the dash channel of lines."""
        values = [DASHES[n % len(DASHES)] for n in self._turns()]
        return alt.StrokeDash(f"{self.field}:N", title=None, scale=self._scale(values))

    def _turns(self) -> list[int]:
        """Return the shapes, other ones for a colour that is used again."""
        both = zip(self.shapes, self.colours, strict=True)
        return [shape + colour // len(SERIES) for shape, colour in both]

    def _scale(self, values: list[Any]) -> alt.Scale:
        return alt.Scale(domain=list(self.names), range=values)

    def shown(self) -> alt.Parameter:
        """Return the selection of shown values; a click on the legend changes it."""
        every = [{self.field: name} for name in self.names]
        given: dict[str, Any] = {"fields": [self.field], "bind": "legend"}
        given |= {"toggle": "true", "clear": False, "empty": False, "value": every}
        return alt.selection_point(name=f"shown_{self.field}", **given)


@dataclass(frozen=True)
class Axis:
    """Title and range of one axis."""

    title: str
    domain: tuple[float, float] | None = None
    log: bool = False
    whole: bool = False
    labels: bool = True
    ticks: Sequence[float] = ()

    def x(self) -> alt.X:
        """Return the axis as the channel of column x."""
        return alt.X("x:Q", **self._settings())

    def y(self) -> alt.Y:
        """Return the axis as the channel of column y."""
        return alt.Y("y:Q", **self._settings())

    def tooltip(self, column: str) -> alt.Tooltip:
        """Return the values of the axis for a tooltip."""
        return alt.Tooltip(f"{column}:Q", title=self.title, format=".4~g")

    def _settings(self) -> dict[str, Any]:
        scale: dict[str, Any] = {"zero": False, "nice": self.labels and not self.whole}
        ends = {"domain": list(self.domain), "nice": False} if self.domain else None
        scale |= ends or {"padding": 8}
        scale |= {"type": "log"} if self.log else {}
        axis: dict[str, Any] = {"tickCount": 5, "labelSeparation": 6}
        axis |= {"tickMinStep": 1, "format": "d"} if self.whole else {}
        axis |= {"values": list(self.ticks)} if self.ticks else {}
        if not self.labels:  # components have no unit
            axis |= {"labels": False, "ticks": False, "grid": False}
        return {"title": self.title, "scale": scale, "axis": axis}


def line_chart(
    frame: pd.DataFrame,
    look: Look,
    title: str,
    x: Axis,
    y: Axis,
    *,
    points: bool = False,
    reference: Sequence[tuple[float, float]] = (),
) -> alt.LayerChart:
    """Return lines through x and y; `reference` is a dotted line behind them."""
    look = look.only(frame[look.field])
    colour = look.colour() if points else look.colour(legend=_STROKES)
    base = _filtered(frame, look).encode(x=x.x(), y=y.y(), color=colour)
    layers = _dotted(reference, x, y)
    lines = base.mark_line(strokeWidth=2, clip=True, aria=False)
    if points:  # the shapes tell them apart
        layers += [lines, _points(base).encode(shape=look.shape())]
    else:
        layers.append(lines.encode(strokeDash=look.dash()))
    told = [alt.Tooltip("setting:N"), x.tooltip("x"), y.tooltip("y")]
    return _finished([*layers, _rings(base, told)], look, title)


def tradeoff_chart(
    points: pd.DataFrame,
    stairs: pd.DataFrame,
    look: Look,
    x: Axis,
    y: Axis,
    reference: Sequence[tuple[float, float]] = (),
) -> alt.LayerChart:
    """Return settings by leak and utility, with a staircase for each curve.

    The column ``first`` of `stairs` holds the setting whose colour the curve has.
    """
    look = look.only(points["setting"])
    base = _filtered(points, look).encode(x=x.x(), y=y.y(), color=look.colour())
    told = [alt.Tooltip("setting:N"), x.tooltip("x"), y.tooltip("y")]
    layers = _dotted(reference, x, y)
    if len(stairs):
        shape: dict[str, Any] = {"interpolate": "step-after", "clip": True}
        steps = _filtered(stairs, look).mark_line(**shape, aria=False)
        colour = look.colour("first")
        layers.append(steps.encode(x=x.x(), y=y.y(), color=colour, detail="curve:N"))
    layers.append(_points(base).encode(shape=look.shape()))
    texts = _filtered(points.join(labels_beside(points, x, y)), look).mark_text(
        **BESIDE, fontSize=11, color=css("ink"), clip=True, aria=False
    )
    layers.append(texts.encode(x=x.x(), y=y.y(), text="label:N"))
    told.append(alt.Tooltip("leaks:N"))
    title = f"{y.title} and {x.title}"
    return _finished([*layers, _rings(base, told)], look, title, _HEIGHT)


def labels_beside(
    points: pd.DataFrame,
    x: Axis,
    y: Axis,
    widths: Sequence[int] = _WIDTHS,
    height: int = _HEIGHT,
    letter: float = _LETTER,
) -> pd.DataFrame:
    """Return label, side and offset of each point, without overlaps at any width.

    A point that has no room beside it has no label. Labels keep off nameless points.
    """
    assert x.domain and y.domain
    (left, right), (low, high) = x.domain, y.domain
    across = np.outer((points["x"] - left) / (right - left), widths)
    down = ((high - points["y"]) / (high - low) * height).to_numpy()
    # Middle and half of the width, then of the height, of what is drawn already.
    sizes = [10.0 if name else 3.0 for name in points["setting"]]
    taken = [(a, size, d, 6.0) for a, size, d in zip(across, sizes, down, strict=True)]
    rows = []
    for own, name in enumerate(points["setting"]):
        half, found = letter * len(name) / 2, ("", 1, 0.0)
        for side, lines in _BESIDE if name else ():
            a, d = across[own] + side * (9 + half), down[own] + lines * 2 * letter
            inside = (half <= a).all() and (a <= np.subtract(widths, half)).all()
            overlaps = (
                (abs(a - b) < half + w).any() and abs(d - e) < letter + h
                for n, (b, w, e, h) in enumerate(taken)
                if n != own
            )
            if inside and letter <= d <= height - letter and not any(overlaps):
                taken.append((a, half, d, letter))
                found = name, side, lines * 2 * letter
                break
        rows.append(found)
    return pd.DataFrame(rows, points.index, ["label", "side", "down"])


def scatter_chart(
    frame: pd.DataFrame, look: Look, title: str, x: Axis, y: Axis
) -> alt.Chart:
    """Return points of several classes."""
    told = [alt.Tooltip("class:N"), x.tooltip("x"), y.tooltip("y")]
    shown, looks = look.shown(), {"shape": look.shape(), "tooltip": told}
    looks |= {"color": look.colour(legend={"labelLimit": 85})}
    marks = alt.Chart(frame).mark_point(filled=True, size=26, opacity=0.75, clip=True)
    points: alt.Chart = marks.encode(x=x.x(), y=y.y(), **looks)
    points = points.transform_filter(shown).add_params(shown, _zoom())
    return points.properties(width="container", height=190, description=title)


def bar_chart(frame: pd.DataFrame, look: Look, title: str) -> alt.LayerChart:
    """Return a bar for the mean of each setting, and a line for the deviation."""
    plain: dict[str, Any] = {"domain": False, "ticks": False, "labelAlign": "left"}
    plain |= {"labelColor": css("ink"), "labelLimit": 320}
    names = alt.Y("setting:N", title=None, sort=list(look.names))
    names = names.axis(**plain, labelOffset=-14, labelPadding=-2)
    told = [alt.Tooltip("setting:N")]
    for each, head in (("mean", title), ("stdev", "standard deviation")):
        told.append(alt.Tooltip(f"{each}(x):Q", title=head, format=".4~g"))
    base = alt.Chart(frame).transform_filter(_UNHIDDEN).encode(y=names)
    bars = base.mark_bar(height=11).encode(
        x=alt.X("mean(x):Q", title=title).axis(tickCount=5),
        color=look.colour().legend(None),
        tooltip=told,
    )
    spread = base.mark_errorbar(
        extent="stdev", color=css("soft"), thickness=2, rule={"strokeDash": [1, 0]}
    ).encode(x=alt.X("x:Q", title=title))
    return _layered([bars, spread], title, alt.Step(34))


def heat_map(
    frame: pd.DataFrame,
    column: str,
    value: Axis,
    title: str,
    scores: Mapping[str, float] | None = None,
) -> alt.LayerChart:
    """Return a cell for each ``setting`` and entry of a column, dark for high values.

    These are in the column ``value``, or in `scores` by the column ``key``.
    """
    low, high = value.domain or (0.0, 1.0)
    base = alt.Chart(frame).transform_filter(_UNHIDDEN)
    if scores is not None:
        base = base.transform_calculate(value="scores[datum.key]")
    plain: dict[str, Any] = {"ticks": False, "domain": False, "title": None}
    names = alt.Axis(labelAngle=-90, labelLimit=230, orient="top", **plain)
    base = base.encode(
        x=alt.X(f"{column}:N", axis=names, sort=None),
        y=alt.Y("setting:N", axis=alt.Axis(labelLimit=110, **plain), sort=None),
    )
    shades = _LEAKS if scores is None else _SCORES
    scale = alt.Scale(range=shades, domain=[low, (low + high) / 2, high], clamp=True)
    bar = alt.Legend(orient="bottom", gradientLength=140, values=[low, high])
    shade = alt.Color("value:Q", title=value.title, scale=scale, legend=bar)
    told = [alt.Tooltip(f"{name}:N") for name in frame if name not in ("value", "key")]
    base = base.encode(tooltip=[*told, value.tooltip("value")])  # on the number too
    rects = base.mark_rect().encode(color=shade)
    ink = alt.expr(f"datum.value > {low + 0.7 * (high - low)} ? 'white' : 'black'")
    short = "replace(format(datum.value, '.2f'), /^0/, '')"
    text = base.mark_text(fontSize=9, color=ink, aria=False).encode(text="short:N")
    if scores is not None:
        rects = rects.add_params(alt.param(name="scores", value=dict(scores)))
    return _layered([rects, text.transform_calculate(short=short)], title, alt.Step(18))


def _dotted(ends: Sequence[tuple[float, float]], x: Axis, y: Axis) -> list[alt.Chart]:
    """Return a dotted line, if it has ends."""
    line = alt.Chart(pd.DataFrame(ends, columns=["x", "y"])).mark_line(
        color=css("soft"), strokeDash=_DOTTED, strokeWidth=1, clip=True, aria=False
    )
    return [line.encode(x=x.x(), y=y.y())] if ends else []


def _zoom() -> alt.Parameter:
    return alt.selection_interval(name="zoom", bind="scales", zoom=_WHEEL)


def _filtered(frame: pd.DataFrame, look: Look) -> alt.Chart:
    return alt.Chart(frame).transform_filter(_UNHIDDEN).transform_filter(look.shown())


def _points(base: alt.Chart) -> alt.Chart:
    look: dict[str, Any] = {"filled": True, "size": 80, "opacity": 1, "clip": True}
    marks: alt.Chart = base.mark_point(**look, aria=False)
    return marks


def _rings(base: alt.Chart, told: list[alt.Tooltip]) -> alt.Chart:
    """Return invisible rings around all points; the pointer reveals one of them."""
    when: dict[str, Any] = {"on": "pointerover", "clear": "pointerout", "empty": False}
    hover = alt.selection_point(name="hover", **when)
    opacity = alt.when(hover).then(alt.value(1)).otherwise(alt.value(0))
    marks = base.mark_point(size=260, filled=False, strokeWidth=2, clip=True)
    rings: alt.Chart = marks.encode(opacity=opacity, tooltip=told).add_params(hover)
    return rings


def _finished(
    layers: list[alt.Chart], look: Look, title: str, height: int = 250
) -> alt.LayerChart:
    layers[-1] = layers[-1].add_params(_zoom(), look.shown())
    return _layered(layers, title, height)


def _layered(layers: list[alt.Chart], title: str, height: Any) -> alt.LayerChart:
    """Put layers together at once: Altair checks all of them again for each change."""
    layers[0] = layers[0].add_params(alt.param(name="hidden", value=[]))
    size: dict[str, Any] = {"width": "container", "height": height}
    return alt.LayerChart(layer=layers, description=title, **size)
