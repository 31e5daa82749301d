"""Each score against an independent reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestCentroid
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks import (
    cosine_attack,
    direct_attack,
    mean_attack,
    median_attack,
    norm_attack,
    spectral_attack,
)

# Small ones are computed in double precision, wide ones in the precision they have.
SHAPES = [(101, 1), (64, 5), (300, 128)]


def case(
    rows: int, width: int, classes: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return a gradient that leaks something, and its labels."""
    stream = torch.Generator().manual_seed(rows + width + classes)
    labels = torch.arange(rows) % classes
    labels = labels[torch.randperm(rows, generator=stream)]
    noise = torch.randn(rows, width, generator=stream, dtype=torch.float64)
    centers = torch.randn(classes, width, generator=stream, dtype=torch.float64)
    return (1e-3 * (noise + centers[labels])).to(dtype), labels


@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape: tuple[int, int]) -> None:
    gradient, _ = case(*shape)
    expected = np.linalg.norm(gradient.numpy(), axis=1)
    np.testing.assert_allclose(norm_attack(gradient), expected, rtol=1e-12)
    single = norm_attack(gradient.float())
    np.testing.assert_allclose(single, expected, rtol=1e-5)


def test_norm_of_very_small_and_very_large_rows() -> None:
    gradient = torch.ones(300, 128) * torch.logspace(-36, 36, 300).unsqueeze(1)
    expected = np.linalg.norm(gradient.double().numpy(), axis=1)
    np.testing.assert_allclose(norm_attack(gradient), expected, rtol=1e-6)
    huge = torch.full((3, 4), 1e300, dtype=torch.float64)
    np.testing.assert_allclose(norm_attack(huge), [2e300] * 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_cosine(shape: tuple[int, int]) -> None:
    gradient, labels = case(*shape)
    known = gradient[labels == 1][0]
    expected = cosine_similarity(gradient.numpy(), known.numpy()[None])[:, 0]
    np.testing.assert_allclose(cosine_attack(gradient, known), expected, atol=1e-9)
    several = cosine_attack(gradient, gradient[:3])
    expected = cosine_similarity(gradient.numpy(), gradient[:3].numpy())
    np.testing.assert_allclose(several, expected, atol=1e-9)


def test_cosine_of_nothing_is_zero() -> None:
    gradient = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    known = torch.tensor([1.0, 0.0])
    assert cosine_attack(gradient, known).tolist() == pytest.approx([0.0, 0.6])
    assert cosine_attack(gradient, torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["mean", "median"])
def test_centers_of_two_classes(kind: str, shape: tuple[int, int]) -> None:
    attack = mean_attack if kind == "mean" else median_attack
    gradient, labels = case(*shape)
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
    gradient, labels = case(120, 7, classes=4)
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
    gradient, labels = case(300, 128)
    moved = gradient / gradient.std() + 1e4
    np.testing.assert_allclose(
        mean_attack(moved.float(), labels),
        mean_attack(moved.float().double(), labels),
        atol=1e-2,
    )


def test_wide_and_long_rows_have_the_same_principal_direction() -> None:
    for rows, width in ((200, 6), (12, 40)):
        gradient, _ = case(rows, width)
        component = PCA(n_components=1).fit_transform(gradient.numpy())[:, 0]
        score = spectral_attack(gradient)
        np.testing.assert_allclose(score, np.abs(component), rtol=1e-6, atol=1e-12)


def test_spectral_finds_the_smaller_group() -> None:
    stream = torch.Generator().manual_seed(3)
    gradient = torch.randn(200, 16, generator=stream)
    gradient[:20] += 3.0
    assert set(spectral_attack(gradient).topk(20).indices.tolist()) == set(range(20))


def test_direct() -> None:
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(50, requires_grad=True, generator=stream)
    labels = torch.randint(0, 2, (50,), generator=stream)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
    (gradient,) = torch.autograd.grad(loss, logits)
    assert direct_attack(gradient).tolist() == labels.tolist()
    assert torch.equal(direct_attack(gradient, hard=False), -gradient.double())
    logits = torch.randn(50, 6, requires_grad=True, generator=stream)
    labels = torch.randint(0, 6, (50,), generator=stream)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert direct_attack(gradient).tolist() == labels.tolist()


def test_gradients_of_any_shape_are_rows() -> None:
    gradient, labels = case(40, 12)
    folded = gradient.reshape(40, 3, 2, 2)
    assert torch.equal(norm_attack(folded), norm_attack(gradient))
    assert torch.equal(mean_attack(folded, labels), mean_attack(gradient, labels))
    known = cosine_attack(folded, folded[0])
    assert torch.equal(known, cosine_attack(gradient, gradient[0]))


def test_half_precision() -> None:
    gradient, labels = case(300, 64, dtype=torch.bfloat16)
    for attack in (norm_attack, spectral_attack):
        expected = attack(gradient.double())
        np.testing.assert_allclose(attack(gradient), expected, rtol=1e-3, atol=1e-5)
    expected = median_attack(gradient.double(), labels)
    scale = float(expected.abs().max())
    found = median_attack(gradient, labels)
    np.testing.assert_allclose(found, expected, atol=1e-4 * scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    gradient, labels = case(300, 64, dtype=torch.float32)
    gradient[7, 3] = bad
    for attack in (norm_attack, spectral_attack, direct_attack):
        with pytest.raises(ConfigError, match="1 numbers of the gradient"):
            attack(gradient)
    for attack in (mean_attack, median_attack):
        with pytest.raises(ConfigError, match="missing or infinite"):
            attack(gradient, labels)


def test_centers_need_labels_of_every_class() -> None:
    gradient, labels = case(20, 3)
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
