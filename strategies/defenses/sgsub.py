"""LADSG: Label-Anonymized Distillation and Similar Gradient Substitution (Yan et al.).

https://arxiv.org/abs/2506.06742. Similar gradient substitution (SGSub), and FLSG, its
predecessor, which differs in the distance only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import check_name, require
from flower_vfl.randomness import Noise
from flower_vfl.rows import RowTransform
from flower_vfl.transform import Batch

Draw = Literal["normal", "entries"]
COVARIANCE_FLOOR = 1e-12  # added to the variance of every column


@dataclass(frozen=True)
class Original:
    """A gradient, scaled and sorted for comparisons with candidates."""

    rows: Tensor
    unit: float
    order: Tensor
    positions: Tensor
    entries: Tensor

    @classmethod
    def of(cls, rows: Tensor, by_rank: bool = True) -> Original:
        """Prepare a gradient."""
        flat = rows.reshape(-1)
        unit = max(float(flat.abs().max()), torch.finfo(rows.dtype).tiny)
        order = ascending(flat)
        positions = order if by_rank else torch.arange(len(flat), device=flat.device)
        return cls(rows, unit, order, positions, flat[positions] / unit)

    @property
    def by_rank(self) -> bool:
        """Whether entries are compared from the smallest to the largest."""
        return self.positions is self.order

    def variances(self) -> Tensor:
        """Return the variance of the column of each entry, plus 1e-12."""
        columns = (self.rows / self.unit).var(dim=0, correction=0)
        # In the same unit, and small enough for an inverse in single precision.
        floor = min(max(COVARIANCE_FLOOR / self.unit / self.unit, 1e-30), 1e30)
        return columns.add_(floor)[self.positions % self.rows.shape[1]]


class Substitute(NamedTuple):
    """A sampled gradient, the number of attempts that it took, and its score."""

    rows: Tensor
    attempts: int
    score: float


def ascending(entries: Tensor) -> Tensor:
    """Return the positions of entries by size, equal entries in their order."""
    small = entries.dtype == torch.float32 and len(entries) <= 2**31
    if entries.device.type != "cpu" or not small:
        return torch.sort(entries, stable=True).indices
    # The bits of floats, read as integers, have the order of the floats if those of
    # negative ones are inverted. With the position in the lower bits, a plain sort of
    # integers is a stable sort of the floats, several times as fast.
    bits = (entries + 0.0).numpy().view(np.int32).astype(np.int64)
    bits ^= (bits >> 63) & 0x7FFFFFFF
    keys = (bits << 32) | np.arange(len(bits))
    keys.sort()
    return torch.from_numpy(keys & 0x7FFFFFFF)


def by_size(entries: Tensor) -> Tensor:
    """Return entries from the smallest to the largest."""
    if entries.device.type == "cpu":
        return torch.from_numpy(np.sort(entries.numpy()))
    return entries.sort().values


def search(
    original: Original,
    score: Callable[[Tensor], float],
    tau: float,
    max_attempts: int,
    stream: Noise,
    draw: Draw = "normal",
) -> Substitute:
    """Sample a similar gradient: the first with a score of at most τ, or the best."""
    entries = original.entries
    std, mean = torch.std_mean(entries, correction=0)
    ends = [float(end) for end in torch.aminmax(entries)]
    best, lowest, attempts = entries, math.inf, 0
    for attempts in range(1, max_attempts + 1):
        if draw == "entries":
            places = stream.uniform(entries.shape).mul_(len(entries)).long()
            candidate = entries[places.clamp_max_(len(entries) - 1).to(entries.device)]
        else:
            drawn = stream.normal(entries.shape, entries.dtype).to(entries.device)
            candidate = drawn.mul_(std).add_(mean).clamp_(*ends)
        if original.by_rank:
            candidate = by_size(candidate)
        found = score(candidate)
        if attempts == 1 or found < lowest:
            best, lowest = candidate, found
        if lowest <= tau:
            break
    ranked = best if original.by_rank else by_size(best)
    rows = torch.empty_like(ranked)
    rows[original.order] = ranked.mul(original.unit)
    rows.clamp_(*(float(end) for end in torch.aminmax(original.rows)))
    return Substitute(rows.reshape(original.rows.shape), attempts, lowest)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two vectors; 1 if both are zero."""
    lengths = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    if lengths == 0.0:
        return float(torch.equal(a, b))
    return float(torch.dot(a, b)) / lengths


def mahalanobis(a: Tensor, b: Tensor, variances: Tensor) -> float:
    """Return the Mahalanobis distance with a diagonal covariance, divided by √n."""
    squares = (a - b).square_().div_(variances)
    return math.sqrt(float(squares.mean(dtype=torch.float64)))


def sgsub(
    rows: Tensor,
    stream: Noise,
    w_cos: float = 0.5,
    w_m: float = 0.5,
    tau: float = 1.0,
    max_attempts: int = 20,
    literal: bool = False,
    draw: Draw = "normal",
) -> Substitute:
    """Replace a gradient by a sampled one that is similar.

    A candidate is n numbers from N(mean, std²) of the entries, clamped to their range,
    or n of the entries with replacement, written in their rank order. Its score is
    W_cos·(1 − cos) + W_M·D_M/√n, with D_M the Mahalanobis distance for the variances of
    the columns (plus 1e-12).
    """
    original = Original.of(rows, by_rank=not literal)
    variances = original.variances()

    def score(candidate: Tensor) -> float:
        alike = cosine(candidate, original.entries)
        turned = alike if literal else max(1.0 - alike, 0.0)
        distance = mahalanobis(candidate, original.entries, variances)
        return w_cos * turned + w_m * distance

    return search(original, score, tau, max_attempts, stream, draw)


def flsg(
    rows: Tensor, stream: Noise, tau: float = 0.8, max_attempts: int = 20
) -> Substitute:
    """Replace a gradient w by a sampled ŵ whose distance ‖ŵ − w‖/‖w‖ is at most τ."""
    original = Original.of(rows)
    length = float(torch.linalg.vector_norm(original.entries)) or 1.0

    def distance(candidate: Tensor) -> float:
        return float(torch.linalg.vector_norm(candidate - original.entries)) / length

    return search(original, distance, tau, max_attempts, stream)


@dataclass(eq=False)
class SGSub(RowTransform):
    """Replace the gradient by a sampled one of similar direction and shape.

    The rank order of the entries survives by construction, and with it most of the
    information about the labels (``python benchmarks/transforms.py --leak``). So
    combine it with an objective that hides labels, as the paper does.

    The paper gives no weights and no τ. With these defaults the first candidate is
    mostly accepted. A column that hardly varies, such as a dead unit, makes the
    Mahalanobis distance large; then all attempts are made.

    Parameters
    ----------
    w_cos, w_m : float (default: 0.5, 0.5)
        Weights of 1 − cosine and of the Mahalanobis distance in the score.
    tau : float (default: 1.0)
        Largest score that is accepted.
    max_attempts : int (default: 20)
        Number of attempts after which the best candidate is taken.
    literal : bool (default: False)
        Score as printed in the paper: with the cosine itself, which favours unlike
        directions, and before the candidate is sorted.
    draw : {"normal", "entries"} (default: "normal")
        What candidates are drawn from: a normal distribution, as in the paper, or the
        entries themselves, with replacement (ours). Where one class is rare most rows
        have small gradients and a few large ones. Normal numbers make the small ones
        large, and the model does not learn.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import SGSub
    >>> rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    >>> changed = SGSub()(rows, Batch("passive-1", step=1, seed=7))
    >>> order = rows.flatten().argsort()
    >>> bool((changed.flatten()[order].diff() >= 0).all())  # the order survives
    True
    """

    w_cos: float = 0.5
    w_m: float = 0.5
    tau: float = 1.0
    max_attempts: int = 20
    literal: bool = False
    draw: Draw = "normal"

    def __post_init__(self) -> None:
        for name, weight in (("w_cos", self.w_cos), ("w_m", self.w_m)):
            require(0.0 <= weight < math.inf, name, "a number from 0", weight)
        require(not math.isnan(self.tau), "tau", "a number", self.tau)
        attempts = self.max_attempts
        require(attempts >= 1, "max_attempts", "at least 1", attempts)
        check_name("draw", self.draw, ("normal", "entries"))

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the substitute."""
        found = sgsub(rows, batch.noise(), **vars(self))
        batch.metrics["sgsub_attempts"] = float(found.attempts)
        batch.metrics["sgsub_score"] = found.score
        return found.rows


class FLSG(RowTransform):
    """Replace the gradient by a sampled one at a small Euclidean distance.

    FLSG: A Novel Defense Strategy Against Inference Attacks in Vertical FL (Fan et al.,
    IEEE Internet of Things Journal 11(2), pages 1816-1828, 2024), SGSub's predecessor.
    Candidates are sampled and sorted as in :class:`SGSub`, so the rank order of the
    entries survives here too.

    Parameters
    ----------
    tau : float (default: 0.8)
        Largest distance that is accepted, relative to the gradient's norm.
    max_attempts : int (default: 20)
        Number of attempts after which the closest candidate is taken.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import FLSG
    >>> rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    >>> batch = Batch("passive-1", step=1, seed=7)
    >>> changed = FLSG(tau=0.8)(rows, batch)
    >>> batch.metrics["flsg_distance"] <= 0.8
    True
    """

    def __init__(self, tau: float = 0.8, max_attempts: int = 20) -> None:
        require(not math.isnan(tau), "tau", "a number", tau)
        require(max_attempts >= 1, "max_attempts", "at least 1", max_attempts)
        self.tau = tau
        self.max_attempts = max_attempts

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the substitute."""
        found = flsg(rows, batch.noise(), self.tau, self.max_attempts)
        batch.metrics["flsg_attempts"] = float(found.attempts)
        batch.metrics["flsg_distance"] = found.score
        return found.rows
