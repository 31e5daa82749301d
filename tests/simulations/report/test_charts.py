"""Charts: valid specifications, looks that differ, colours of pictures."""

from __future__ import annotations

import altair as alt
import pandas as pd
import pytest

from flower_vfl.simulations.report.charts import (
    COLOURS,
    DARK,
    DASHES,
    SERIES,
    SHAPES,
    Axis,
    Look,
    bar_chart,
    css,
    line_chart,
    scatter_chart,
    theme,
    tradeoff_chart,
    with_colours,
)

NAMES = ["no defense", "marvell:s=4"]
LOOK = Look("setting", NAMES, [0, 1], [0, 1])
LINES = pd.DataFrame(
    {"setting": NAMES * 2, "x": [1, 1, 2, 2], "y": [0.5, 0.6, 0.7, 0.9]}
)
POINTS = LINES.assign(curve="marvell", first=NAMES[1], quality="", leaks="")
BARS = pd.DataFrame({"setting": NAMES * 2, "x": [1.0, 2.0, 1.5, 2.5]})
CLASSES = LINES.rename(columns={"setting": "class"})
X, Y = Axis("step", whole=True), Axis("leak AUC", (0.4, 1.0))
CHARTS = {
    "lines": line_chart(LINES, LOOK, "lines", X, Y, reference=[(1, 0.5), (2, 0.5)]),
    "points": line_chart(LINES, LOOK, "points", Axis("n", log=True), Y, points=True),
    "tradeoff": tradeoff_chart(POINTS, POINTS, LOOK, "tradeoff"),
    "scatter": scatter_chart(
        CLASSES, Look("class", NAMES, [0, 1], [0, 1]), "scatter", X, Y
    ),
    "bars": bar_chart(BARS, LOOK, "bars"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_specifications_are_valid(name: str) -> None:
    spec = CHARTS[name].to_dict(validate=True)
    assert spec["description"] == name and spec["width"] == "container"
    parameters = {param["name"] for param in spec["params"]}
    legend = {"scatter": "shown_class", "bars": "hidden"}.get(name, "shown_setting")
    assert legend in parameters and (("zoom" in parameters) == (name != "bars"))


def test_a_theme_is_valid() -> None:
    alt.Chart(LINES).mark_line().configure(**theme()).to_dict(validate=True)


def test_pictures_have_colours_instead_of_variables() -> None:
    spec = CHARTS["lines"].to_dict()
    assert css("s1") in str(spec)
    assert "var(" not in str(with_colours([spec, theme()], COLOURS))
    assert COLOURS["s1"] in str(with_colours(spec, COLOURS))


def _contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [value / 255 for value in bytes.fromhex(colour[1:])]
        linear = [
            p / 12.92 if p <= 0.04 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [COLOURS, DARK])
def test_colours_can_be_read(colours: dict[str, str]) -> None:
    assert colours.keys() == COLOURS.keys()
    for text in ("ink", "soft"):
        assert _contrast(colours[text], colours["paper"]) > 4.5
    for series in SERIES:
        assert _contrast(colours[series], colours["paper"]) > 2
    assert len({colours[series] for series in SERIES}) == len(SERIES)


def test_seven_series_differ_in_colour_shape_and_dash() -> None:
    assert len(SERIES) == len(set(SHAPES)) == len({tuple(d) for d in DASHES}) == 7
