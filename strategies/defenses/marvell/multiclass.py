"""Marvell's noise for more than two classes, our extension of the paper.

All classes share one covariance in the span of the class means. It minimises the
between-class scatter relative to the variance within the classes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .solver import allowed_sum_kl, lowest

Vector = NDArray[np.float64]
_CHUNK = 1 << 20  # numbers that a comparison of class pairs holds at a time


@dataclass(frozen=True)
class MulticlassNoise:
    """Noise for several classes, and the divergence it achieves."""

    directions: Tensor
    along: Vector
    isotropic: Vector
    power: float
    spread: float
    sum_kl: float


def water_fill(scatter: Vector, within: float, power: float) -> Vector:
    """Return the λ ≥ 0 of a given sum that minimise Σ scatter/(λ + within)."""
    if len(scatter) == 0:
        return scatter
    roots = np.sqrt(scatter)
    active = np.arange(1, len(roots) + 1)
    levels = (power + active * within) / np.cumsum(roots)
    filled = int(np.count_nonzero(roots * levels > within)) or 1
    lambdas = roots * levels[filled - 1] - within
    lambdas[filled:] = 0.0
    above: Vector = np.maximum(lambdas, 0.0)
    return above


def worst_pair(means: Vector, variances: Vector, along: Vector, outside: int) -> float:
    """Return the largest sum of divergences between two of several classes.

    Class a is N(means[a], along + variances[a]), with variances[a] outside of the span.
    """
    first, second = np.triu_indices(len(means), 1)
    chunk = max(_CHUNK // max(len(along), 1), 1)
    worst = 0.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = 1.0 / (variances[:, None] + along)
        for start in range(0, len(first), chunk):
            a, b = first[start : start + chunk], second[start : start + chunk]
            apart = np.abs(variances[a] - variances[b])
            squared = np.square(means[a] - means[b])
            shift = squared * (inverse[a] + inverse[b])
            shift = np.where(squared > 0.0, shift, 0.0).sum(axis=1)
            wide = apart[:, None]
            shape = ((wide * inverse[a]) * (wide * inverse[b])).sum(axis=1)
            if outside > 0:  # 0·∞ otherwise
                shape += (apart / variances[a]) * (apart / variances[b]) * outside
            shape = np.where(apart > 0.0, shape, 0.0)
            worst = max(worst, float(0.5 * (shift + shape).max()))
    return worst


def solve_multiclass(
    means: Tensor, variances: Vector, weights: Vector, s: float, auc: float | None
) -> MulticlassNoise:
    """Return the noise for three classes or more."""
    d = means.shape[1]
    directions, inside = _span(means, torch.from_numpy(weights))
    scatter = weights @ np.square(inside)
    spread = float(scatter.sum()) / (0.5 * float(1.0 - np.square(weights).sum()))
    isotropic = np.zeros_like(variances)
    if auc is not None:
        isotropic = _lift(variances, allowed_sum_kl(auc) / d)
    noisy = variances + isotropic
    within = float(weights @ noisy)

    def divergence(power: float) -> float:
        along = water_fill(scatter, within, power)
        return worst_pair(inside, noisy, along, d - len(scatter))

    power = min(s * spread, 1e300)
    if auc is not None:
        enough = _enough(inside, scatter, within, allowed_sum_kl(auc))
        power = lowest(divergence, allowed_sum_kl(auc), enough)
    along = water_fill(scatter, within, power)
    total = float(along.sum()) + d * float(weights @ isotropic)
    reached = divergence(power)
    return MulticlassNoise(directions, along, isotropic, total, spread, reached)


def _span(means: Tensor, weights: Tensor) -> tuple[Tensor, Vector]:
    """Return the principal directions of the means and the means in them."""
    centred = means - weights @ means
    basis, mixed = torch.linalg.qr((centred * weights.sqrt().unsqueeze(1)).T)
    turn, singular, _ = torch.linalg.svd(mixed, full_matrices=False)
    rank = int((singular > 1e-14 * singular[0]).sum())
    directions = (basis @ turn[:, :rank]).T
    inside: Vector = (centred @ directions.T).numpy()
    return directions, inside


def _lift(variances: Vector, allowed: float) -> Vector:
    """Return what to add so that (1 − r)²/r ≤ allowed for the ratio r of variances."""
    ratio = 1.0 + allowed / 2.0 - np.sqrt(allowed + allowed * allowed / 4.0)
    missing: Vector = np.maximum(ratio * variances.max() - variances, 0.0)
    return missing


def _enough(inside: Vector, scatter: Vector, within: float, allowed: float) -> float:
    """Return a power that hides the means within the other half of the divergence."""
    if len(scatter) == 0:
        return 0.0
    diameter = 4.0 * float(np.square(inside).sum(axis=1).max())
    level = 2.0 * diameter / allowed + within
    roots = np.sqrt(scatter)
    return level * float(roots.sum() / roots.min())
