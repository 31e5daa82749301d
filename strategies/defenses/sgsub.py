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
_PIECE = 2**14  # numbers that stay in the cache


class Original(NamedTuple):
    """A gradient with what a comparison with candidates needs."""

    rows: Tensor
    unit: float  # of the entries; 1 unless their squares would vanish or overflow
    entries: Tensor
    ends: tuple[float, float]
    order: Tensor
    mean: float
    std: float
    variances: Tensor  # of the columns, plus 1e-12

    @classmethod
    def of(cls, rows: Tensor) -> Original:
        """Prepare a gradient."""
        order = ascending(rows.reshape(-1))
        low, high = rows.reshape(-1)[order[[0, -1]]].tolist()
        largest = max(-low, high, torch.finfo(rows.dtype).tiny)
        unit = 1.0 if 1e-9 < largest < 1e9 else largest
        entries = rows if unit == 1.0 else rows / unit
        means = entries.mean(dim=0)
        centred = entries - means
        # The mean of a constant column is rounded, so the centred one has a mean too.
        rest = centred.mean(dim=0).square_()
        squares = centred.square_().mean(dim=0).sub_(rest).clamp_min_(0.0).double()
        means = means.double()
        mean = float(means.mean())
        std = math.sqrt(float((squares + (means - mean).square_()).mean()))
        # Added in the same unit, and neither zero nor infinite there.
        squares += min(max(COVARIANCE_FLOOR / unit / unit, 1e-30), 1e30)
        flat, ends = entries.reshape(-1), (low / unit, high / unit)
        return cls(rows, unit, flat, ends, order, mean, std, squares)

    def placed(self, ranked: Tensor) -> Tensor:
        """Return numbers from the smallest to the largest in the order of entries."""
        return torch.empty_like(ranked).scatter_(0, self.order, ranked)


class Substitute(NamedTuple):
    """A sampled gradient, the number of attempts that it took, and its score."""

    rows: Tensor
    attempts: int
    score: float


def ascending(entries: Tensor) -> Tensor:
    """Return the positions of entries by size; how ties are ordered is fixed."""
    small = entries.dtype == torch.float32 and len(entries) <= 2**29
    if entries.device.type != "cpu" or not small:
        return torch.sort(entries, stable=True).indices
    # A single as a double has 29 bits to spare. With the position in them, one sort of
    # numbers gives the order, several times as fast as an argsort.
    given, keys = entries.numpy(), np.empty(len(entries))
    positions, places = keys.view(np.int64), np.arange(_PIECE)
    for start in range(0, len(keys), _PIECE):
        part = slice(start, start + _PIECE)
        keys[part] = given[part]
        positions[part] |= places[: len(keys) - start]
        places += _PIECE
    keys.sort()
    positions &= 2**29 - 1
    return torch.from_numpy(positions)


def exponential_sums(
    stream: Noise, count: int, dtype: torch.dtype, tail: int = 1
) -> tuple[Tensor, float, Tensor]:
    """Return n partial sums of negated exponential numbers, and the sum of n + 1.

    Partial sums, divided by the sum of all, have the distribution of a sorted sample of
    n numbers from 0 to 1 (Devroye, Non-Uniform Random Variate Generation, V.3). The
    last numbers come too, the last one first.
    """
    smallest = 2.0 ** -torch.finfo(dtype).bits  # the logarithm of 0 is infinite
    steps = torch.empty(count + 1, dtype=dtype)
    for start in range(0, count + 1, 4 * _PIECE):
        part = steps[start : start + 4 * _PIECE]
        drawn = stream.signed(len(part), dtype).abs_().clamp_min_(smallest)
        torch.log(drawn, out=part)
    last = steps[-tail:].flip(0)
    sums = steps.cumsum_(0)
    return sums[:-1], float(sums[-1]), last


def ascending_normal(
    stream: Noise, count: int, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Return a sorted sample of normal numbers: quantiles of a uniform one."""
    # A probability next to 1 has few digits: each tail is summed from its end.
    tail = count // 1024 + 1
    sums, total, last = exponential_sums(stream, count, dtype, tail)
    ends = torch.cat((sums[:tail], last.cumsum_(0))).double()
    ends = torch.special.ndtri(ends.div_(total)).div_(math.sqrt(2.0))
    torch.add(sums.new_tensor(-1.0), sums, alpha=2.0 / total, out=sums).erfinv_()
    sums[:tail], sums[-tail:] = ends[:tail], ends[tail:].neg().flip(0)
    torch.add(sums.new_tensor(mean), sums, alpha=math.sqrt(2.0) * std, out=sums)
    drawn = sums.numpy()  # torch compares several times as slowly
    swapped = (drawn[1:] < drawn[:-1]).any()  # by rounding
    return sums.sort().values if swapped else sums


def sample(original: Original, stream: Noise, draw: Draw, ordered: bool) -> Tensor:
    """Return one number per entry, from the smallest to the largest or unordered."""
    entries, count = original.entries, len(original.entries)
    dtype, device = entries.dtype, entries.device
    if draw == "entries" and ordered:
        sums, total, _ = exponential_sums(stream, count, dtype)
        places = sums.mul_(count / total).long()
    elif draw == "entries":
        places = stream.uniform((count,), dtype).mul_(count).long()
    elif ordered:
        drawn = ascending_normal(stream, count, dtype, original.mean, original.std)
        return drawn.to(device).clamp_(*original.ends)
    else:
        drawn = stream.normal((count,), dtype).mul_(original.std).add_(original.mean)
        return drawn.to(device).clamp_(*original.ends)
    return entries[original.order[places.clamp_max_(count - 1).to(device)]]


def search(
    original: Original,
    score: Callable[[Tensor], float],
    tau: float,
    max_attempts: int,
    stream: Noise,
    draw: Draw = "normal",
    literal: bool = False,
) -> Substitute:
    """Sample a similar gradient: the first with a score of at most τ, or the best."""
    best, lowest, attempts = original.entries, math.inf, 0
    for attempts in range(1, max_attempts + 1):
        candidate = sample(original, stream, draw, ordered=not literal)
        if not literal:
            candidate = original.placed(candidate)
        found = score(candidate)
        if attempts == 1 or found < lowest:
            best, lowest = candidate, found
        if lowest <= tau:
            break
    if literal:
        best = original.placed(best.sort().values)
    if original.unit != 1.0:
        best = best.mul(original.unit).clamp_(*torch.aminmax(original.rows))
    return Substitute(best.reshape(original.rows.shape), attempts, lowest)


def cosine(a: Tensor, b: Tensor, length: float) -> float:
    """Return the cosine of the angle to a vector; 1 if both are zero."""
    lengths = float(torch.linalg.vector_norm(a)) * length
    if lengths == 0.0:
        return float(torch.equal(a, b))
    return float(torch.dot(a, b)) / lengths


def mahalanobis(a: Tensor, b: Tensor, variances: Tensor) -> float:
    """Return the distance for the variances of the columns, divided by √n."""
    squares = (a - b).square_().reshape(-1, len(variances)).mean(dim=0)
    return math.sqrt(float((squares.double() / variances).mean()))


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
    original = Original.of(rows)

    squared = original.mean**2 + original.std**2
    length = math.sqrt(squared * len(original.entries))

    def score(candidate: Tensor) -> float:
        alike = cosine(candidate, original.entries, length)
        turned = alike if literal else max(1.0 - alike, 0.0)
        distance = mahalanobis(candidate, original.entries, original.variances)
        return w_cos * turned + w_m * distance

    return search(original, score, tau, max_attempts, stream, draw, literal)


def flsg(
    rows: Tensor, stream: Noise, tau: float = 0.8, max_attempts: int = 20
) -> Substitute:
    """Replace a gradient w by a sampled ŵ whose distance ‖ŵ − w‖/‖w‖ is at most τ."""
    original = Original.of(rows)
    length = float(torch.linalg.vector_norm(original.entries)) or 1.0

    def distance(candidate: Tensor) -> float:
        return float(torch.linalg.vector_norm(candidate - original.entries)) / length

    return search(original, distance, tau, max_attempts, stream)


def check_limits(tau: float, max_attempts: int) -> None:
    """Refuse a limit or a number of attempts that cannot work."""
    require(not math.isnan(tau), "tau", "a number", tau)
    require(max_attempts >= 1, "max_attempts", "at least 1", max_attempts)


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
        check_limits(self.tau, self.max_attempts)
        check_name("draw", self.draw, ("normal", "entries"))

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the substitute."""
        found = sgsub(rows, batch.noise(), **vars(self))
        batch.metrics["sgsub_attempts"] = float(found.attempts)
        batch.metrics["sgsub_score"] = found.score
        return found.rows


@dataclass(eq=False)
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

    tau: float = 0.8
    max_attempts: int = 20

    def __post_init__(self) -> None:
        check_limits(self.tau, self.max_attempts)

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the substitute."""
        found = flsg(rows, batch.noise(), self.tau, self.max_attempts)
        batch.metrics["flsg_attempts"] = float(found.attempts)
        batch.metrics["flsg_distance"] = found.score
        return found.rows
