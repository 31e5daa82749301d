"""Values of a table: how cells show and compare them, how results are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score
from study_cases import columns_of

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.capture import CAPTURE_FILE
from flower_vfl.simulations.cli.predict import predict_saved
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.papers.cell_metrics import (
    Found,
    completion,
    decisions,
    final,
    leak,
    neighbours,
    row_sum,
    sent,
    separation,
    series,
    spread,
)
from flower_vfl.simulations.papers.experiments import Column
from flower_vfl.simulations.papers.reproduce import Cell, compare
from flower_vfl.simulations.parties import load_rows
from flower_vfl.simulations.results import PARTIES_FOLDER, table
from flower_vfl.simulations.runtime.engines import run_and_attack


def cell(values: tuple[float, ...], paper: str, **settings: Any) -> Cell:
    return Cell(values, Column("a", "final", **settings), paper)


def test_a_cell_shows_mean_and_standard_error() -> None:
    assert cell((0.5, 0.7), "").text == "0.600 ± 0.100"  # 0.141 / √2
    assert cell((0.5,), "").text == "0.500"
    assert cell((), "0.3").text == ""
    assert cell((0.5, 0.7), "", seeds="min").text == "0.500"
    assert cell((0.5, 0.7), "", seeds="max", digits=1).text == "0.7"
    assert cell((-1.25,), "", beside="b", how="percent").text == "-1.250%"


SURE = (0.49, 0.5, 0.51)  # standard error 0.006


@pytest.mark.parametrize(
    ("values", "paper", "verdict"),
    [
        (SURE, "0.54", "alike"),  # within the tolerance
        (SURE, "0.56", "differs"),
        (SURE, "0.56±0.04", "undecided"),  # within two deviations of the paper
        (SURE, "0.53±0.04", "alike"),
        ((0.4, 0.6), "0.7", "undecided"),  # within two standard errors of ours
        ((0.3, 0.7), "0.5", "undecided"),  # equal by chance
        ((0.5,), "0.5", "undecided"),  # one seed says little,
        ((0.5,), "0.56", "differs"),  # but may be too far away
        (SURE, "", None),
        ((), "0.9", None),
        (SURE, "-0.049", "differs"),
        ((0.0179, 0.0179), "1.79e-2 ± 7.03e-5", "alike"),
        ((1.12, 1.12), "1.12 (58 s)", "alike"),
    ],
)
def test_a_cell_is_alike_only_if_it_is_known_well_enough(
    values: tuple[float, ...], paper: str, verdict: str | None
) -> None:
    assert cell(values, paper).verdict(0.05) == verdict


@pytest.mark.parametrize(
    ("values", "paper", "verdict"),
    [
        # deviation 0.02, error 0.015: twice that is within the tolerance
        ((0.5, 0.52, 0.54), "0.52", "alike"),
        ((0.5, 0.52, 0.54), "0.56", "differs"),
        # deviation 0.04, error 0.03: it is not, and 2 · √(0.04² + 0.03²) = 0.1
        ((0.5, 0.54, 0.58), "0.5", "undecided"),
        ((0.5, 0.54, 0.58), "0.59", "undecided"),
        ((0.5, 0.54, 0.58), "0.61", "differs"),
    ],
)
def test_an_extreme_has_the_error_of_an_order_statistic(
    values: tuple[float, ...], paper: str, verdict: str
) -> None:
    assert cell(values, paper, seeds="min").verdict(0.05) == verdict


@pytest.mark.parametrize("runs", [2, 3, 10])
def test_the_error_of_the_largest_value_is_that_of_normal_values(runs: int) -> None:
    largest = stats.order_statistic(stats.Normal(), r=runs, n=runs)
    values = tuple(stats.norm.rvs(size=runs, random_state=1))
    best = cell(values, "", seeds="max")
    expected = largest.standard_deviation() * best.deviation
    assert best.error == pytest.approx(expected, rel=2e-3)


def test_values_are_compared_in_three_ways() -> None:
    own, other = pd.Series({0: 3.0, 1: 1.9, 3: 1.0}), pd.Series({1: 2.0, 0: 2.0})
    assert compare(own, other, "ratio").to_dict() == {0: 1.5, 1: 0.95}
    assert compare(own, other, "difference")[0] == 1.0
    assert compare(own, other, "percent")[1] == pytest.approx(-5.0)
    assert compare(own, 0.0 * other, "ratio").isna().all()


def run_of() -> Found:
    """A run of two epochs with two steps each."""
    values = {"a": [0.1, 0.2, 0.3, 0.4], "b": [0.5, 0.6, 0.7, 0.8], "a+b": [0.9]}
    rows = [
        {"party": party, "step": 1 + place, "epoch": 1 + place // 2, "value": value}
        for party, found in values.items()
        for place, value in enumerate(found)
    ]
    rows.append({"party": "a", "layer": "deep.0", "step": 4, "epoch": 2, "value": 0.66})
    rows = [{"metric": "leak", "attack": "norm", **row} for row in rows]
    rows.append({**rows[0], "metric": "leak_random", "value": 0.5})
    entry = {"party": "a", "test": None, "labels_only_test": None}
    entries = [
        {"attack": "passive:labels=4", "train": 0.2, "labels_only_train": 0.1, **entry},
        {"attack": "passive:labels=4", "train": 0.4, "labels_only_train": 0.1, **entry},
        {"attack": "active", "train": 0.9, "labels_only_train": None, **entry},
    ]
    return Found(table({"records": columns_of(rows), "completion": entries}))


def test_series_are_read_by_epoch_and_party() -> None:
    run = run_of()
    assert leak(run, "norm", flipped=False) == pytest.approx(0.45)
    assert leak(run, "norm", flipped=False, parties="max") == pytest.approx(0.65)
    last = leak(run, "norm", flipped=False, epochs="last", parties="a")
    assert last == pytest.approx(0.35)
    assert series(run, "leak", "norm", epochs="first", statistic="max") == 0.4
    assert series(run, "leak", "norm", parties="a+b") == 0.9
    layer = leak(run, "norm", flipped=False, layers=["features.0", "deep.0"])
    assert layer == 0.66
    spread_of = spread({"a": 0.2, "b": 0.5, "c": 0.9}, of=["a", "b"])
    assert spread_of == pytest.approx(0.3)
    q95 = series(run, "leak", "norm", statistic="q95", parties="b")
    assert q95 == pytest.approx(np.quantile([0.5, 0.6, 0.7, 0.8], 0.95))
    for wrong in (
        lambda: leak(run, "cosine"),
        lambda: leak(run, "norm", flipped=False, layers=["first"]),
        lambda: series(run, "leak", "norm", parties="c"),
        lambda: series(run, "leak", "norm", "deep.0", epochs="first"),
        lambda: series(run, "leak", "norm", statistic="median"),
        lambda: completion(run, "direct"),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_the_first_known_metric_is_read() -> None:
    rows = [{"metric": "accuracy", "split": "test", "step": 4, "value": 0.7}]
    run = Found(table({"records": columns_of(rows)}))
    assert final(run, ["test_auc", "test_accuracy"]) == final(run, "test_accuracy")
    with pytest.raises(ConfigError, match="test_accuracy"):
        final(run, ["test_auc", "test_f1"])


def test_completions_are_read_by_attack() -> None:
    run = run_of()
    assert completion(run) == pytest.approx(0.3)
    assert completion(run, "active") == 0.9
    assert completion(run, alone=True) == pytest.approx(0.1)


def test_neighbours_tell_separate_classes_from_mixed_ones(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    labels = np.arange(200) % 2
    for shift, low, high in ((10.0, 1.0, 1.0), (0.0, 0.3, 0.7)):
        rows = stream.normal(size=(200, 3)) + shift * labels[:, None]
        arrays: dict[str, Any] = {"embedding/passive-1": rows, "label": labels}
        np.savez(tmp_path / CAPTURE_FILE, **arrays)
        assert low <= neighbours(Found(pd.DataFrame(), tmp_path)) <= high
    parts: dict[str, Any] = {"part/gan": np.array([[1.0, -2.0], [0.5, 1.0]])}
    np.savez(tmp_path / CAPTURE_FILE, **parts)
    assert row_sum(Found(pd.DataFrame(), tmp_path), "gan") == 0.25
    with pytest.raises(ConfigError, match="set capture"):
        neighbours(Found(pd.DataFrame(), tmp_path / "elsewhere"))


def test_kept_gradients_predictions_and_values_are_read(tmp_path: Path) -> None:
    labels = np.array([0, 0, 1, 1])
    arrays: dict[str, Any] = {
        "gradient/passive-1": np.array([[-1.0], [-3.0], [4.0], [6.0]]),
        "gradient_label/passive-1": labels,
        "gradient_prediction/passive-1": np.array([0.1, 0.2, 0.3, 0.4]),
        "embedding/passive-1": np.array([[5.0], [4.0], [3.0], [2.0]]),
        "label": np.array([2.0, 3.0, 4.0, 5.0]),
        "prediction": np.array([0.0, 0.0, 0.0, 0.0]),
    }
    np.savez(tmp_path / CAPTURE_FILE, **arrays)
    run = Found(pd.DataFrame(), tmp_path)
    assert separation(run) == pytest.approx(7.0)  # means -2 and 5, deviation 1
    assert separation(run, norms=True) == pytest.approx(3.0)
    assert sent(run) == pytest.approx(-1.0)
    assert decisions(run, "train") == 0.5  # all are decided for class 0
    arrays |= {"label": labels, "prediction": np.array([0.1, 0.7, 0.6, 0.9])}
    np.savez(tmp_path / CAPTURE_FILE, **arrays)
    assert decisions(run) == 0.75


def test_training_rows_are_evaluated_at_the_end(tmp_path: Path) -> None:
    config = RunConfig(epochs=2, train_metrics=True, out=str(tmp_path))
    config = replace(config, state_dir=str(tmp_path / PARTIES_FOLDER))
    found = run_and_attack(config, "in-process")["final"]
    frame = predict_saved(tmp_path, "train")
    rows = load_rows(config, 0)
    truth = dict(zip(rows.ids.astype(str), rows.labels, strict=True))
    labels = [truth[name] for name in frame["id"].astype(str)]
    scores = frame["probability of benign"]
    auc = roc_auc_score(labels, scores)
    assert found["train_auc"] == pytest.approx(auc, abs=1e-9)
    assert "train_auc" not in run_and_attack(RunConfig(epochs=1), "in-process")["final"]
