"""The mean and the median attack against scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meter_cases import SHAPES, scores_case
from scipy.spatial.distance import cdist
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestCentroid

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.leakage.attacks import (
    cosine_attack,
    mean_attack,
    median_attack,
    median_split,
    norm_attack,
)
from flower_vfl.leakage.meter import LeakageMeter


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["mean", "median"])
def test_centers_of_two_classes(kind: str, shape: tuple[int, int]) -> None:
    attack = mean_attack if kind == "mean" else median_attack
    gradient, labels = scores_case(*shape)
    center = getattr(np, kind)
    known = [center(gradient[labels == c].numpy(), axis=0) for c in (0, 1)]
    distances = cdist(gradient.numpy(), np.stack(known))
    expected = distances[:, 0] - distances[:, 1]
    np.testing.assert_allclose(
        attack(gradient, labels), expected, atol=1e-9 * np.abs(expected).max()
    )
    given = attack(gradient, centers=torch.from_numpy(np.stack(known)))
    np.testing.assert_allclose(given, expected, atol=1e-9 * np.abs(expected).max())
    hard = attack(gradient, labels, hard=True)
    assert hard.tolist() == (expected >= 0).astype(int).tolist()
    single = attack(gradient.float(), labels)
    np.testing.assert_allclose(single, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["mean", "median"])
def test_centers_of_several_classes(kind: str) -> None:
    attack = mean_attack if kind == "mean" else median_attack
    gradient, labels = scores_case(120, 7, classes=4)
    x, y = gradient.numpy(), labels.numpy()
    known = np.stack([getattr(np, kind)(x[y == c], axis=0) for c in range(4)])
    distances = cdist(x, known)
    expected = np.empty_like(distances)
    for c in range(4):
        expected[:, c] = np.delete(distances, c, axis=1).min(axis=1) - distances[:, c]
    np.testing.assert_allclose(
        attack(gradient, labels), expected, atol=1e-9 * np.abs(expected).max()
    )
    hard = attack(gradient, labels, hard=True)
    assert hard.tolist() == distances.argmin(axis=1).tolist()
    if kind == "mean":
        model = NearestCentroid().fit(x, y)
        assert hard.tolist() == model.predict(x).tolist()


def test_median_of_an_even_number_lies_between() -> None:
    gradient = torch.tensor([[0.0], [1.0], [5.0], [10.0], [20.0], [30.0], [90.0]])
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    # The medians are 3 and 30; 16.5 is between them.
    expected = [3 - 30, 2 - 29, 2 - 25, 7 - 20, 17 - 10, 27 - 0, 87 - 60]
    assert median_attack(gradient, labels).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("width, dtype", [(1, torch.float64), (128, torch.float32)])
def test_rows_on_a_line_tie_beyond_the_centers(width: int, dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(1)
    labels = torch.arange(300) % 2
    along = torch.randn(300, generator=stream, dtype=torch.float64) + labels
    line = torch.rand(width, generator=stream, dtype=torch.float64) + 0.1
    gradient = (along.unsqueeze(1) * line).to(dtype)
    low, high = along[labels == 0].mean(), along[labels == 1].mean()
    scores = mean_attack(gradient, labels)
    for tied in (scores[along > high], scores[along < low]):
        # In single precision a row right beside a center may miss the tie.
        same = int((tied == tied.mode().values).sum())
        assert len(tied) > 50 and same >= len(tied) * (0.95 if width > 1 else 1.0)
    cosines = cosine_attack(gradient, gradient[labels == 1][0])
    assert len(cosines.unique()) == 2


def test_a_common_offset_does_not_change_distances() -> None:
    gradient, labels = scores_case(300, 128)
    moved = gradient / gradient.std() + 1e4
    np.testing.assert_allclose(
        mean_attack(moved.float(), labels),
        mean_attack(moved.float().double(), labels),
        atol=1e-2,
    )


def test_centers_need_labels_of_every_class() -> None:
    gradient, labels = scores_case(20, 3)
    with pytest.raises(ConfigError, match="needs labels"):
        mean_attack(gradient)
    with pytest.raises(ConfigError, match="no row of class 1"):
        mean_attack(gradient, torch.zeros(20))
    with pytest.raises(ConfigError, match="no row of class 0"):
        median_attack(gradient, torch.ones(20))
    with pytest.raises(ConfigError, match="19 labels for 20 rows"):
        mean_attack(gradient, labels[:-1])
    with pytest.raises(ConfigError, match="floating point"):
        norm_attack(torch.ones(3, 2, dtype=torch.long))


def test_sums_of_rows_are_compared_as_one_column() -> None:
    gradient, labels = scores_case(40, 3)
    found, expected = (
        [m.value for m in LeakageMeter([spec]).measure({"a": rows}, labels, step=1)]
        for spec, rows in (
            ("mean:sums=true", gradient),
            ("mean", gradient.sum(dim=1, keepdim=True)),
        )
    )
    assert found == pytest.approx(expected)
    separate = LeakageMeter(["mean"]).measure({"a": gradient}, labels, step=1)
    assert found != pytest.approx([m.value for m in separate])


@pytest.mark.parametrize("positives", [10, 25, 39])
def test_median_split_of_a_perfect_gradient(positives: int) -> None:
    labels = (torch.arange(100) < positives).long()
    gradient = (labels.double() - 0.3).unsqueeze(1) * torch.linspace(1, 2, 100)[:, None]
    found = roc_auc_score(labels, median_split(gradient))
    share = positives / 100
    assert found == pytest.approx(0.5 * (1 + 0.5 / (1 - share)))
    meter = LeakageMeter(["median:split=batch,hard=true"], "binary", baseline=False)
    measured = meter.measure({"a": gradient}, labels, step=1)
    assert measured and all(m.value == pytest.approx(found) for m in measured)


def test_median_split_is_for_two_classes() -> None:
    meter = LeakageMeter(["median:split=batch"], "multiclass", baseline=False)
    with pytest.raises(VerticalError, match="needs two classes"):
        meter.measure({"a": torch.randn(9, 2)}, torch.arange(9) % 3, step=1)
    with pytest.raises(ConfigError, match="class, batch"):
        LeakageMeter(["median:split=half"], "binary", baseline=False)
