"""The mean attack and the median attack of GAFM, which know a center of each class.

Han et al., GAFM (see :mod:`flower_vfl.objectives.gafm`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.objectives import Task

from .known import (
    Array,
    Known,
    as_rows,
    products,
    round_scores,
    rows_and_norms,
    to_numpy,
)

FindCenters = Callable[[Tensor, Sequence[Array]], Array]
_LARGE, _ENOUGH = 2**16, 127  # entries of a gradient; rows, an odd number of them


def mean_attack(
    gradient: Tensor,
    labels: Tensor | None = None,
    centers: Tensor | None = None,
    hard: bool = False,
) -> Tensor:
    """Return how much nearer a row is to the mean of class 1 than to that of class 0.

    ‖g−μ0‖ − ‖g−μ1‖. With more than two classes, the column of class c is the distance
    to the nearest other mean less the distance to μ_c.

    Parameters
    ----------
    gradient : Tensor
        One row per example.
    labels : Tensor | None (default: None)
        Class numbers, to take the means from the rows themselves.
    centers : Tensor | None (default: None)
        The class means, one row each, if the attacker knows them already.
    hard : bool (default: False)
        Return the number of the nearest class (a tie between 0 and 1 counts as 1).

    Examples
    --------
    >>> gradient = torch.tensor([[0.0], [2.0], [10.0]])
    >>> mean_attack(gradient, torch.tensor([0, 0, 1])).round(decimals=3).tolist()
    [-9.0, -7.0, 9.0]
    """
    return _center_attack(class_means, gradient, labels, centers, hard)


def median_attack(
    gradient: Tensor,
    labels: Tensor | None = None,
    centers: Tensor | None = None,
    hard: bool = False,
) -> Tensor:
    """Return how much nearer a row is to the median of class 1 than to that of class 0.

    Parameters
    ----------
    gradient, labels, centers, hard
        As for :func:`mean_attack`, with the median of every coordinate as the center.

    Examples
    --------
    >>> gradient = torch.tensor([[0.0], [1.0], [5.0], [7.0]])
    >>> median_attack(gradient, torch.tensor([0, 0, 0, 1]), hard=True).tolist()
    [0, 0, 1, 1]
    """
    return _center_attack(class_medians, gradient, labels, centers, hard)


def median_split(gradient: Tensor, hard: bool = True) -> Tensor:
    """Return whether the sum of a row exceeds the median of all rows' sums.

    The median attack of GAFM's released code, which knows no class: it gives half of a
    batch to class 1. With a share p < ½ of positives, the AUC of a perfect gradient is
    therefore ½·(1 + ½/(1−p)).

    Parameters
    ----------
    gradient : Tensor
        One row per example.
    hard : bool (default: True)
        Return 1 above the median and else 0; False returns the difference.

    Examples
    --------
    >>> median_split(torch.tensor([[-1.0], [0.0], [2.0], [9.0]])).tolist()
    [0, 0, 1, 1]
    """
    sums = as_rows(gradient).double().sum(dim=1)
    above = sums - sums.quantile(0.5)
    return (above > 0).long() if hard else above


def _center_attack(
    find: FindCenters,
    gradient: Tensor,
    labels: Tensor | None,
    centers: Tensor | None,
    hard: bool,
) -> Tensor:
    rows, norms = rows_and_norms(as_rows(gradient).double())
    if centers is not None:
        scores = _nearness(rows, norms, to_numpy(as_rows(centers).double()))
    elif labels is not None:
        scores = _nearness(rows, norms, find(rows, _groups(labels, len(rows))))
    else:
        raise ConfigError("the attack needs labels or the center of each class")
    found = _nearest_class(scores) if hard else _merge_ties(scores)
    return torch.from_numpy(found).to(rows.device)


def _nearness(rows: Tensor, norms: Tensor, centers: Array) -> Array:
    """Return how much nearer rows are to the center of a class than to the others.

    For two classes, rows and centers of several parties may be stacked.
    """
    lengths = np.square(centers).sum(axis=-1, keepdims=True)
    relative = lengths - 2.0 * products(rows, centers)  # ‖g−μ‖² − ‖g‖²
    squares = np.square(to_numpy(norms))[..., None, :]
    distances = np.sqrt(np.maximum(relative + squares, 0.0))
    if centers.shape[-2] == 2:
        # The difference of the squares over the sum of the distances loses no digits.
        both = np.maximum(distances.sum(axis=-2), np.finfo(distances.dtype).tiny)
        gap: Array = (relative[..., 0, :] - relative[..., 1, :]) / both
        return gap
    nearest, second = np.partition(distances, 1, axis=0)[:2]
    own = distances.argmin(axis=0) == np.arange(len(centers))[:, None]
    scores: Array = np.where(own, second, nearest) - distances
    return scores.T


def _nearest_class(scores: Array) -> Array:
    """Return the position of the nearest center."""
    chosen = scores >= 0 if scores.ndim == 1 else scores.argmax(axis=1)
    return chosen.astype(np.int64)


def _merge_ties(scores: Array) -> Array:
    return round_scores(scores, float(np.abs(scores).max()))


def _groups(labels: Tensor, rows: int) -> list[Array]:
    """Return the row numbers of every class from 0 to the largest label."""
    numbers = to_numpy(labels.detach().reshape(-1).long())
    if len(numbers) != rows or not rows:
        raise ConfigError(f"got {len(numbers)} labels for {rows} rows")
    groups = [np.flatnonzero(numbers == c) for c in range(max(numbers.max(), 1) + 1)]
    empty = [c for c, group in enumerate(groups) if not len(group)]
    if empty:
        raise ConfigError(f"there is no row of class {empty[0]} to take a center from")
    return groups


def class_means(rows: Tensor, groups: Sequence[Array]) -> Array:
    """Return the mean of each group of rows, from a product, which copies no rows."""
    members = np.zeros((len(groups), rows.shape[-2]), dtype=np.float32)
    for member, group in zip(members, groups, strict=True):
        member[group] = 1.0
    sums = to_numpy(torch.from_numpy(members).to(rows) @ rows)
    means: Array = sums / members.sum(axis=1, keepdims=True)
    return means


def class_medians(
    rows: Tensor, groups: Sequence[Array], sample: int | None = None
) -> Array:
    """Return the median of every coordinate of each group, or of a sample of each."""
    chosen = [_thin(group, sample) for group in groups]
    if len({len(group) for group in chosen}) == 1:
        return _medians(rows, np.stack(chosen))
    each = [_medians(rows, group[None]) for group in chosen]
    return np.concatenate(each, axis=-2)


def _thin(group: Array, sample: int | None) -> Array:
    """Return evenly spaced entries of a group that is larger than a sample."""
    if sample is None or len(group) <= sample:
        return group
    thinned: Array = group[np.arange(sample) * len(group) // sample]
    return thinned


def _medians(rows: Tensor, groups: Array) -> Array:
    """Return the median of every column of each of several groups of one size.

    Several times faster than np.median and torch.median, see benchmarks/meter_cost.py.
    """
    chosen = torch.from_numpy(to_numpy(rows)[..., groups, :])
    columns = chosen.mT.contiguous().numpy()
    columns.sort(axis=-1)  # for floats as fast as a partition
    half = groups.shape[1] // 2
    medians: Array = columns[..., half]
    if groups.shape[1] % 2 == 0:  # halves: the sum of two large numbers overflows
        medians = 0.5 * medians + 0.5 * columns[..., half - 1]
    return medians


@dataclass(frozen=True)
class MeanAttack:
    """The mean attack by name.

    With `held_out` a row is compared with the centers of the half of its class to which
    it does not belong. With `sums` it is compared by its sum, as in GAFM's released
    code.
    """

    hard: bool = False
    held_out: bool = False
    sums: bool = False
    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass")

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return differences of distances, or 1 for the nearest class and else 0."""
        if self.sums:
            gradient, norms = rows_and_norms(gradient.sum(dim=1, keepdim=True))
            known = replace(known, norms=norms)
        if self.held_out:
            first = [group[0::2] for group in known.groups]
            second = [g[1::2] if len(g) > 1 else g for g in known.groups]
            scores = self._compare(gradient, known, first)
            scored: Any = np.concatenate(first)
            scored = (..., scored) if gradient.ndim > 2 else scored
            scores[scored] = self._compare(gradient, known, second)[scored]
        else:
            scores = self._compare(gradient, known, known.groups)
        if not self.hard:
            if gradient.ndim > 2:  # of several parties
                largest = np.abs(scores).max(axis=-1, keepdims=True)
                return torch.from_numpy(round_scores(scores, largest))
            return torch.from_numpy(_merge_ties(scores)).to(gradient.device)
        if gradient.ndim > 2:
            return torch.from_numpy(scores >= 0).to(gradient)
        chosen = torch.from_numpy(_nearest_class(scores))
        if scores.ndim > 1:
            chosen = F.one_hot(chosen, scores.shape[1])
        return chosen.to(gradient)

    def _compare(self, rows: Tensor, known: Known, groups: Sequence[Array]) -> Array:
        return _nearness(rows, known.norms, self.centers(rows, groups))

    def centers(self, rows: Tensor, groups: Sequence[Array]) -> Array:
        """Return the mean of each group of rows."""
        return class_means(rows, groups)


@dataclass(frozen=True)
class MedianAttack(MeanAttack):
    """The median attack by name; medians of large gradients come from a sample.

    With the split ``"batch"`` it is :func:`median_split`.
    """

    sample: int | Literal["auto"] | None = "auto"
    split: Literal["class", "batch"] = "class"

    def __post_init__(self) -> None:
        """Refuse an empty sample."""
        enough = not isinstance(self.sample, int) or self.sample >= 1
        require(enough, "sample", "a number from 1 or none", self.sample)
        check_name("split of the median attack", self.split, ("class", "batch"))

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return differences of distances, or 1 for the nearest class and else 0."""
        if self.split == "class":
            return super().__call__(gradient, known)
        if known.task != "binary":
            raise ConfigError("median:split=batch needs two classes")
        return median_split(gradient, self.hard).to(gradient)

    def centers(self, rows: Tensor, groups: Sequence[Array]) -> Array:
        """Return the median of each group of rows."""
        if self.sample != "auto":
            return class_medians(rows, groups, self.sample)
        large = rows.shape[-2] * rows.shape[-1] > _LARGE
        return class_medians(rows, groups, _ENOUGH if large else None)
