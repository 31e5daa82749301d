"""Pieces of the report by hand: axes, curves, markers, dashes, markup, names."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from flower_vfl.simulations.report.axes import Scale, shown, tick_texts
from flower_vfl.simulations.report.calibration import reliability
from flower_vfl.simulations.report.curves import short_party, thinned
from flower_vfl.simulations.report.markup import Markup, element
from flower_vfl.simulations.report.raster import dashed
from flower_vfl.simulations.report.scene import MARKERS, shape_path
from flower_vfl.simulations.report.tradeoff import stairs


def test_markers_differ_and_are_of_one_size() -> None:
    shapes = [str(shape_path(marker, 0, 0, 1)) for marker in MARKERS]
    assert len(set(shapes)) == len(MARKERS)
    for marker in MARKERS:
        for line in shape_path(marker, 10, 10, 4):
            assert all(abs(x - 10) <= 5 and abs(y - 10) <= 5 for x, y in line)


def test_stairs_by_hand() -> None:
    # (0.5, 0.6) is beaten by (0.6, 0.8)
    x, y = stairs([(0.2, 0.9), (0.5, 0.6), (0.6, 0.8), (1.0, 0.1)])
    assert list(zip(x, y, strict=True)) == [
        *((0.0, 0.9), (0.2, 0.9), (0.2, 0.8), (0.6, 0.8), (0.6, 0.1), (1.0, 0.1))
    ]
    assert np.trapezoid(y, x) == pytest.approx(0.2 * 0.9 + 0.4 * 0.8 + 0.4 * 0.1)


def test_thinning_by_hand() -> None:
    assert thinned([(1, 0.5), (2, 0.7), (1, 0.7)]) == (
        [1, 2],
        [pytest.approx(0.6), 0.7],
    )
    x, y = thinned([(n, n % 2) for n in range(1000)], most=10)
    assert x == [pytest.approx(49.5 + 100 * n) for n in range(10)]
    assert y == [pytest.approx(0.5)] * 10


def test_reliability_is_that_of_sklearn() -> None:
    draw = np.random.default_rng(0)
    predictions = draw.random(1000)
    hits = (draw.random(1000) < predictions**2).astype(float)
    true, mean = calibration_curve(hits, predictions, n_bins=10, strategy="quantile")
    x, y = reliability(predictions, hits, 10)
    np.testing.assert_allclose(x, mean)
    np.testing.assert_allclose(y, true)


def test_axes() -> None:
    assert Scale(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Scale(0.41, 1.0, 0, 100)(0.705) == pytest.approx(50)
    assert Scale(0.0, 1.0, 0, 100)(7.0) == 100  # never beyond the axis
    log = Scale(1.0, 64.0, 0, 60, log=True)
    assert log.ticks() == [1, 4, 16, 64]
    assert log(8.0) == pytest.approx(30)
    assert [shown(v) for v in (0, 0.5, 1234.0, 0.00012)] == [
        "0",
        "0.5",
        "1234",
        "1.2e-4",
    ]


def test_steps_are_whole() -> None:
    assert Scale(0.9, 2.1, 0, 100, whole=True).ticks() == [1, 2]
    assert Scale(1.0, 12.0, 0, 100, whole=True).ticks() == [5, 10]


def test_ticks_can_be_told_apart() -> None:
    assert tick_texts([0.5, 0.6]) == ["0.5", "0.6"]
    assert tick_texts([0.99980, 0.99985]) == ["0.9998", "0.99985"]
    assert tick_texts([1e7, 2e7]) == ["1e7", "2e7"]


def test_dashes() -> None:
    pieces = list(dashed(((0, 0), (10, 0), (10, 5)), (4, 2)))
    assert pieces == [
        [(0, 0), (4, 0)],
        [(6, 0), (10, 0)],
        [(10, 2), (10, 5)],
    ]
    assert list(dashed(((0, 0), (1, 1)), ())) == [[(0, 0), (1, 1)]]


def test_markup_escapes() -> None:
    made = element("p", "a<b", Markup("<i></i>"), class_="x", data_y='"', hidden=False)
    assert made == '<p class="x" data-y="&quot;">a&lt;b<i></i></p>'


def test_names_of_coalitions() -> None:
    assert short_party("passive-1+passive-2") == "passive-1+passive-2"
    assert short_party("+".join(f"passive-{n}" for n in range(64))) == "coalition of 64"
