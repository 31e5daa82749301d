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
    labels_beside,
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
    "tradeoff": tradeoff_chart(POINTS, POINTS, LOOK, Axis("leak", (0, 3)), Y),
    "scatter": scatter_chart(
        CLASSES, Look("class", NAMES, [0, 1], [0, 1]), "scatter", X, Y
    ),
    "bars": bar_chart(BARS, LOOK, "bars"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_specifications_are_valid(name: str) -> None:
    spec = CHARTS[name].to_dict(validate=True)
    described = {"tradeoff": "leak AUC and leak"}.get(name, name)
    assert spec["description"] == described and spec["width"] == "container"
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


def test_labels_beside_points_by_hand() -> None:
    # Two points 3 pixels apart: one label to the right of its point, the other to the
    # left or in another line; the point at the right edge has its label on the left.
    places = [(0.5, 0.5), (0.51, 0.5), (0.99, 0.9)]
    points = pd.DataFrame(places, columns=["x", "y"]).assign(setting=["a", "bb", "ccc"])
    x, y = Axis("leak", (0.0, 1.0)), Axis("AUC", (0.0, 1.0))
    found = labels_beside(points, x, y, (300,), 300, 6)
    assert list(found["label"]) == ["a", "bb", "ccc"]
    assert found["side"][0] == -1 and found["down"][0] == 0  # bb is on its right
    assert (found["side"][1], found["down"][1]) == (1, 0)
    assert found["side"][2] == -1
    # 300 names at one place do not all have room, and none lies on another
    many = pd.concat([points[:1]] * 30).assign(setting="marvell:s=4")
    assert 0 < sum(label != "" for label in labels_beside(many, x, y)["label"]) < 30


def test_labels_do_not_meet_on_a_wider_chart() -> None:
    # At 300 pixels "left" would end before "right" begins, at 650 they would meet.
    points = pd.DataFrame(
        {"x": [0.40, 0.55], "y": 0.5, "setting": ["l" * 20, "r" * 20]}
    )
    x, y = Axis("leak", (0.0, 1.0)), Axis("AUC", (0.0, 1.0))
    found = labels_beside(points, x, y)
    for width in (300, 350, 400, 450, 500, 550, 600, 650):
        spans = []
        for place, side, down in zip(
            points["x"], found["side"], found["down"], strict=True
        ):
            start = width * place + side * 9 - (20 * 6.2 if side < 0 else 0)
            spans.append((start, start + 20 * 6.2, down))
        (a, b, one), (c, d, other) = spans
        assert one != other or b <= c or d <= a


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
