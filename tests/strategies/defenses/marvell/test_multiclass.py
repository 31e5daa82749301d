"""Marvell with more than two classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from marvell_cases import batch_of, changed, gradient
from scipy.optimize import minimize
from torch.distributions import MultivariateNormal, kl_divergence

from flower_vfl.strategies.defenses.marvell.multiclass import (
    solve_multiclass,
    water_fill,
    worst_pair,
)
from flower_vfl.strategies.defenses.marvell.solver import solve_marvell
from flower_vfl.strategies.defenses.marvell.transform import Marvell, class_statistics
from flower_vfl.transform import AUC_BOUND


def test_water_filling_is_optimal() -> None:
    scatter, within, power = np.array([9.0, 4.0, 1.0, 0.01]), 0.7, 5.0
    found = minimize(
        lambda x: (scatter / (x + within)).sum(),
        np.full(4, power / 4),
        bounds=[(0, None)] * 4,
        constraints={"type": "eq", "fun": lambda x: x.sum() - power},
        options={"ftol": 1e-15},
    )
    filled = water_fill(scatter, within, power)
    np.testing.assert_allclose(filled, found.x, atol=1e-5)
    assert filled.sum() == pytest.approx(power) and filled[3] == 0.0
    assert not water_fill(scatter, within, 0.0).any()
    assert water_fill(scatter[:0], within, power).size == 0


@pytest.mark.parametrize("d", [3, 7])
def test_worst_pair_is_the_largest_divergence_of_torch(d: int) -> None:
    stream = torch.Generator().manual_seed(2)
    means = torch.randn(4, d, generator=stream, dtype=torch.float64)
    variances, weights = np.array([0.5, 1.0, 0.8, 2.0]), np.array([0.1, 0.2, 0.3, 0.4])
    noise = solve_multiclass(means, variances, weights, 2.0, None)
    shared = noise.directions.T @ torch.diag(torch.from_numpy(noise.along))
    shared = shared @ noise.directions
    normals = [
        MultivariateNormal(mean, shared + variance * torch.eye(d, dtype=torch.float64))
        for mean, variance in zip(means, variances, strict=True)
    ]
    pairs = [
        float(kl_divergence(a, b) + kl_divergence(b, a))
        for a in normals
        for b in normals
    ]
    assert noise.sum_kl == pytest.approx(max(pairs), rel=1e-9)
    assert noise.power == pytest.approx(2.0 * noise.spread)


def test_worst_pair_without_variance() -> None:
    means, zeros = np.array([[0.0], [1.0], [3.0]]), np.zeros(3)
    assert worst_pair(means, zeros, np.array([2.0]), 5) == pytest.approx(9 / 2)
    assert worst_pair(means, zeros, np.array([0.0]), 0) == math.inf
    assert worst_pair(means[:, :0], zeros, np.array([]), 3) == 0.0
    assert worst_pair(means[:, :0], np.arange(3.0), np.array([]), 3) == math.inf


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_two_classes_reduce_to_the_paper(p: float) -> None:
    means = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]], dtype=torch.float64)
    q, s = 13.0, 4.0
    noise = solve_multiclass(means, np.full(2, 0.2), np.array([1 - p, p]), s, None)
    assert noise.spread == pytest.approx(q)
    assert noise.along == pytest.approx([s * q])
    solution = solve_marvell(0.2, 0.2, 3, q, p, s * q)
    if p == 0.5:  # otherwise covariances of their own hide a little more
        assert solution.lambda1_neg == pytest.approx(s * q)
        assert noise.sum_kl == pytest.approx(solution.sum_kl)
    else:
        assert solution.sum_kl < noise.sum_kl < 1.05 * solution.sum_kl


def test_spread_is_the_mean_distance_of_two_classes() -> None:
    rows, labels = gradient(classes=3)
    sizes, means, variances = class_statistics(rows, labels, 3)
    weights = (sizes / sizes.sum()).numpy()
    total = weight = 0.0
    for a in range(3):
        for b in range(a):
            both = weights[a] * weights[b]
            total += both * float((means[a] - means[b]).square().sum())
            weight += both
    noise = solve_multiclass(means, variances.numpy(), weights, 1.0, None)
    assert noise.spread == pytest.approx(total / weight)


def test_noise_of_many_classes_lies_in_the_span_of_their_means() -> None:
    rows, labels = gradient(rows=3000, d=8, classes=4)
    defense, batch = Marvell(s=3.0), batch_of(labels)
    noise = (changed(defense, rows, batch) - rows).double()
    _, means, _ = class_statistics(rows, labels, 4)
    basis = torch.linalg.svd(means - means.mean(dim=0))[2][:3]
    torch.testing.assert_close(noise @ basis.T @ basis, noise, atol=1e-4, rtol=0)
    distances = torch.pdist(means).square().mean()
    power = float(noise.square().sum(dim=1).mean() / distances)
    assert power == pytest.approx(3.0, rel=0.1)
    assert 0.5 < batch.metrics[AUC_BOUND] <= 1.0


def test_two_of_several_classes_use_the_formula_for_two() -> None:
    rows, labels = gradient()
    defense = Marvell()
    other, several = gradient(classes=5)
    changed(defense, other, batch_of(several))
    expected = changed(Marvell(), rows, batch_of(labels, step=2))
    result = changed(defense, rows, batch_of(4 * labels, step=2))
    assert torch.equal(result, expected)
