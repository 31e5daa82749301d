"""Each metric against scikit-learn, scipy or a number worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from covering import covering
from scipy.stats import pearsonr
from sklearn import metrics
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks import (
    adaptive_calibration_error,
    leak_auc,
    pearson_rho,
    roc_auc,
    summarise,
)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SCALES = (2.0**-10, 1.0, 2.0**100)  # fits in 32 bits or not


@pytest.mark.parametrize(
    ("ties", "rate", "dtype", "scale"),
    covering((0, 3, 50), (0.02, 0.3, 0.9), (torch.float32, torch.float64), SCALES),
)
def test_auc(ties: int, rate: float, dtype: torch.dtype, scale: float) -> None:
    scores = torch.randn(6, 500, generator=stream(ties), dtype=dtype)
    if ties:
        scores = (scores * ties).round() / ties
    scores *= scale
    scores[1].abs_()
    scores[2, ::2] *= 0.0  # 0 and -0 tie
    positive = torch.rand(500, generator=stream(1)) < rate
    expected = [metrics.roc_auc_score(positive, row) for row in scores.numpy()]
    found = roc_auc(scores, positive)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_auc_by_hand() -> None:
    labels = torch.tensor([1, 0, 1, 0, 0])
    # Pairs: 3 beats 1, 2, 2; 2 beats 1 and ties twice: 5 of 6.
    assert leak_auc(torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0]), labels) == 5 / 6
    assert leak_auc(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), labels) == 0.0
    assert leak_auc(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), labels, True) == 1.0
    assert leak_auc(torch.zeros(5), labels) == 0.5
    assert leak_auc(torch.tensor([1, 0, 0, 0, 0]), labels) == 0.75
    assert math.isnan(leak_auc(torch.zeros(3), torch.ones(3)))
    assert math.isnan(leak_auc(torch.zeros(3), torch.zeros(3)))


def test_auc_of_several_classes() -> None:
    labels = torch.randint(0, 5, (300,), generator=stream())
    scores = torch.rand(300, 5, generator=stream(1), dtype=torch.float64)
    scores[:, 1] += (labels == 1).double()
    scores[:, 2] -= (labels == 2).double()
    shares = scores / scores.sum(dim=1, keepdim=True).abs()
    each = [metrics.roc_auc_score(labels == c, scores[:, c]) for c in range(5)]
    assert leak_auc(scores, labels) == pytest.approx(np.mean(each), abs=1e-12)
    flipped = np.mean([max(a, 1 - a) for a in each])
    assert leak_auc(scores, labels, flipped=True) == pytest.approx(flipped, abs=1e-12)
    positive = (shares - shares.min() + 0.1).numpy()
    positive /= positive.sum(axis=1, keepdims=True)
    expected = metrics.roc_auc_score(labels, positive, multi_class="ovr")
    assert leak_auc(torch.from_numpy(positive), labels) == pytest.approx(expected)


def test_one_score_stands_for_every_class() -> None:
    labels = torch.tensor([0, 1, 2, 2])
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    # 0 against the rest: 0; 1: 1 of 3 pairs; 2: 1.
    assert leak_auc(scores, labels) == pytest.approx((0 + 1 / 3 + 1) / 3)
    assert leak_auc(scores, labels, True) == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert math.isnan(leak_auc(scores, torch.full((4,), 2)))


def test_labels_and_scores_must_fit() -> None:
    with pytest.raises(ConfigError, match="3 labels for 4 rows"):
        leak_auc(torch.zeros(4), torch.zeros(3))
    with pytest.raises(ConfigError, match="pearson_rho"):
        leak_auc(torch.zeros(2), torch.tensor([0.5, 1.0]))
    with pytest.raises(ConfigError, match="2 columns"):
        leak_auc(torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    with pytest.raises(ConfigError, match="missing or infinite"):
        leak_auc(torch.tensor([0.0, float("nan")]), torch.tensor([0, 1]))


def test_rho() -> None:
    labels = torch.randn(80, generator=stream(), dtype=torch.float64) * 10 + 3
    scores = torch.randn(4, 80, generator=stream(1), dtype=torch.float64)
    scores[1] += labels
    scores[2] = 1e-200 * scores[1]
    scores[3] = 5.0
    expected = [pearsonr(row, labels)[0] for row in scores[:2]]
    found = pearson_rho(scores, labels)
    np.testing.assert_allclose(found[:2], expected, atol=1e-12)
    assert found[2] == pytest.approx(expected[1])
    assert found[3] == 0.0
    assert pearson_rho(-labels, labels) == pytest.approx(-1.0)
    assert pearson_rho(scores[0], torch.full((80,), 0.1)) == 0.0


def guesses() -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.randint(0, 6, (200,), generator=stream())
    scores = torch.randn(200, 6, generator=stream(1))
    scores[torch.arange(200), labels] += 1.0
    return labels, scores, scores.argmax(dim=1)


def slow_ace(column: np.ndarray, hits: np.ndarray, bins: int) -> float:
    """Return the error of one class, bin by bin; no two predictions are the same."""
    order = np.argsort(column)
    parts = np.array_split(order, bins)
    return float(np.mean([abs(column[p].mean() - hits[p].mean()) for p in parts]))


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ace(bins: int) -> None:
    labels, scores, _ = guesses()
    shares = torch.softmax(scores.double(), dim=1)
    each = [
        slow_ace(shares[:, c].numpy(), (labels == c).numpy().astype(float), bins)
        for c in range(6)
    ]
    found = adaptive_calibration_error(shares, labels, bins)
    assert found == pytest.approx(np.mean(each), abs=1e-12)
    found = adaptive_calibration_error(shares[:, 1], (labels == 1).long(), bins)
    assert found == pytest.approx(each[1], abs=1e-12)


def test_ace_by_hand() -> None:
    shares = torch.tensor([0.1, 0.2, 0.6, 0.9])
    labels = torch.tensor([0, 0, 1, 1])
    # Bins (.1, .2) and (.6, .9): |.15 - 0| and |.75 - 1|.
    assert adaptive_calibration_error(shares, labels, 2) == pytest.approx(0.2)
    # The same prediction for all: 40 % of the rows are of class 1.
    shares, labels = torch.full((10,), 0.3), torch.tensor([1] * 4 + [0] * 6)
    assert adaptive_calibration_error(shares, labels, 5) == pytest.approx(0.1)
    mixed = labels[torch.randperm(10, generator=stream())]
    assert adaptive_calibration_error(shares, mixed, 5) == pytest.approx(0.1)
    # More bins than rows: one row each.
    found = adaptive_calibration_error(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
    assert found == pytest.approx(0.25)
    with pytest.raises(ConfigError, match="bins"):
        adaptive_calibration_error(shares, labels, 0)


def test_summary() -> None:
    values = torch.rand(50, generator=stream()).tolist()
    assert summarise(values) == {
        "mean": pytest.approx(np.mean(values)),
        "last": values[-1],
        "max": max(values),
        "q95": pytest.approx(np.quantile(values, 0.95)),
    }
    assert summarise([0.0]) == {"mean": 0.0, "last": 0.0, "max": 0.0, "q95": 0.0}
    assert summarise([]) == {}
