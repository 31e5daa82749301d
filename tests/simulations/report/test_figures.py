"""Frames of charts by hand: means over steps, staircases, names."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from flower_vfl.simulations.report.data import Report, short_names, short_party
from flower_vfl.simulations.report.figures import binned, calibration, stairs
from flower_vfl.simulations.studies.tradeoff import area


def test_many_settings_do_not_look_the_same() -> None:
    names = [f"defense-{number}" for number in range(16)]
    for families in (names, ["marvell"] * len(names)):
        runs = pd.DataFrame({"setting": names, "family": families})
        look = Report("t", "compare", runs, pd.DataFrame(), {}, {}).look
        colours, *others = (
            map(str, channel.to_dict()["scale"]["range"])
            for channel in (look.colour(), look.shape(), look.dash())
        )
        colours = list(colours)
        for other in others:
            assert len(set(zip(colours, other, strict=True))) == len(names)


def test_stairs_by_hand() -> None:
    # a leak of 0.75 for a utility of 0.6 is beaten by 0.7 for 0.8
    places = [(0.9, 0.9), (0.75, 0.6), (0.7, 0.8), (0.5, 0.1)]
    found = stairs(pd.DataFrame(places, columns=["x", "y"]).assign(setting="a"))
    corners = list(found[["x", "y"]].itertuples(index=False, name=None))
    assert corners == [(0.5, 0.1), (0.7, 0.8), (0.9, 0.9), (1.0, 0.9)]
    steps = 2 * np.diff(found["x"]) * found["y"].to_numpy()[:-1]
    assert steps.sum() == pytest.approx(area([(2 * (1 - x), y) for x, y in places]))


def test_means_over_steps_by_hand() -> None:
    few = pd.DataFrame({"setting": "a", "step": [1, 2, 1], "value": [0.5, 0.7, 0.7]})
    assert binned(few, "step")[["x", "y"]].to_numpy().tolist() == [[1, 0.6], [2, 0.7]]
    steps = np.arange(1000)
    many = pd.DataFrame({"setting": "a", "step": steps, "value": steps % 2})
    found = binned(many, "step", most=10)
    assert found["x"].tolist() == [49.5 + 100 * n for n in range(10)]
    assert found["y"].tolist() == [0.5] * 10
    both = binned(pd.concat([few, many.assign(setting="b")]), "step")
    assert both["setting"].value_counts().to_dict() == {"a": 2, "b": 40}


def test_calibration_by_hand() -> None:
    assert calibration([{}]) is None
    draw = np.random.default_rng(0)
    predictions = draw.random(1000)
    labels = (draw.random(1000) < predictions**2).astype(int)
    task = np.asarray("binary")
    halves = [
        {"task": task, "prediction": predictions[part], "label": labels[part]}
        for part in (slice(0, 400), slice(400, None))
    ]
    found = calibration(halves)
    assert found is not None
    curve, error, rows = found
    assert rows == 1000 and 0.1 < error < 0.3
    order = np.argsort(predictions).reshape(10, 100)
    np.testing.assert_allclose(curve["x"], predictions[order].mean(axis=1))
    np.testing.assert_allclose(curve["y"], labels[order].mean(axis=1))


def test_short_names_of_methods() -> None:
    gafm = "objective=gafm + width=1 + aggregation=mean"
    assert short_names(["none", gafm, "preset=ladsg", "iso:t=4"]) == {
        **{"none": "none", gafm: "gafm", "preset=ladsg": "ladsg", "iso:t=4": "iso:t=4"}
    }
    two = ["objective=gafm + width=1", "objective=gafm + width=2"]
    assert list(short_names(two).values()) == ["gafm + width=1", "gafm + width=2"]
    assert short_names(["objective=gafm + marvell:s=4"]).popitem()[1] == (
        "gafm + marvell:s=4"
    )


def test_names_of_coalitions() -> None:
    assert short_party("passive-1+passive-2") == "passive-1+passive-2"
    assert short_party("+".join(f"passive-{n}" for n in range(64))) == "coalition of 64"
