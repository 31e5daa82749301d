"""The mean attack and the median attack of GAFM, which know a center of each class.

Han et al., GAFM (see :mod:`flower_vfl.objectives.gafm`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.objectives import Task

from .known import (
    Array,
    Known,
    as_rows,
    compare,
    round_scores,
    rows_and_norms,
    to_numpy,
)

FindCenters = Callable[[Tensor, Sequence[Array]], Array]
_LARGE = 2**16  # entries of a gradient
_ENOUGH, _TRIPLES = 127, 243  # rows: an odd number, and 27 threes of threes


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
        known = to_numpy(as_rows(centers).double())
    elif labels is not None:
        known = find(rows, _groups(labels, len(rows)))
    else:
        raise ConfigError("the attack needs labels or the center of each class")
    scores = nearness(*compare(rows, norms, known))
    if hard:
        chosen = scores >= 0 if scores.ndim == 1 else scores.argmax(axis=0)
        return torch.from_numpy(chosen.astype(np.int64)).to(rows.device)
    return torch.from_numpy(merge_ties(scores, len(known)).T).to(rows.device)


def nearness(products: Array, lengths: Array, norms: Array) -> Array:
    """Return how much nearer rows are to the center of a class than to the others.

    One score per row for two classes, and else a row of scores for each class.
    """
    relative = lengths - 2.0 * products  # ‖g−μ‖² − ‖g‖²
    distances = relative + np.square(norms)
    np.sqrt(np.maximum(distances, 0.0, out=distances), out=distances)
    if distances.shape[-2] == 2:
        # The difference of the squares over the sum of the distances loses no digits.
        both = distances[..., 0, :] + distances[..., 1, :]
        np.maximum(both, np.finfo(both.dtype).tiny, out=both)
        gap: Array = relative[..., 0, :] - relative[..., 1, :]
        gap /= both
        return gap
    nearest, second = np.partition(distances, 1, axis=0)[:2]
    own = distances.argmin(axis=0) == np.arange(len(distances))[:, None]
    scores: Array = np.where(own, second, nearest) - distances
    return scores


def merge_ties(scores: Array, classes: int) -> Array:
    """Round scores to a part of the largest one, of each party or of all classes."""
    axis = -1 if classes == 2 else None
    return round_scores(scores, np.abs(scores).max(axis=axis, keepdims=True))


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


@np.errstate(all="ignore")  # of numbers that are not finite, which callers look for
def class_means(rows: Tensor, groups: Sequence[Array]) -> Array:
    """Return the mean of each group of rows, from a product, which copies no rows."""
    single = rows.dtype == torch.float32
    shares = np.zeros((len(groups), len(rows)), np.float32 if single else np.float64)
    for share, group in zip(shares, groups, strict=True):
        share[group] = 1.0 / len(group)
    if len(groups) == 2 and rows.device.type == "cpu":  # a third of torch's time
        found: Array = shares @ to_numpy(rows)
        return found
    return to_numpy(torch.from_numpy(shares).to(rows) @ rows)


def class_medians(
    rows: Tensor, groups: Sequence[Array], sample: int | None = None
) -> Array:
    """Return the median of every coordinate of each group, or of a sample of each.

    Several times faster than np.median and torch.median, see benchmarks/meter_cost.py.
    """
    chosen = [_thin(group, sample) for group in groups]
    numbers = torch.from_numpy(np.concatenate(chosen)).to(rows.device)
    columns = to_numpy(rows.index_select(0, numbers).T.contiguous())
    sizes = [len(group) for group in chosen]
    if len({*sizes}) == 1:  # one sort
        return _middle(columns.reshape(len(columns), len(sizes), -1)).T
    parts = np.split(columns, np.cumsum(sizes[:-1]), axis=1)
    return np.stack([_middle(part) for part in parts])


def _remedians(rows: Tensor, groups: Sequence[Array]) -> Array:
    """Estimate the median of each group by taking medians of three rows, twice.

    With 243 rows, this is about as accurate as the median of 127 rows and takes two
    thirds of the time (Rousseeuw and Bassett, The remedian, JASA 1990).
    """
    chosen = np.concatenate([_thin(group, _TRIPLES) for group in groups])
    few = to_numpy(rows).take(chosen, axis=0).reshape(len(groups), _TRIPLES, -1)
    for _ in range(2):
        first, second, third = np.split(few, 3, axis=1)
        smaller = np.minimum(first, second)
        few = np.maximum(first, second)
        np.minimum(few, third, out=few)
        np.maximum(few, smaller, out=few)
    return _middle(np.ascontiguousarray(few.transpose(0, 2, 1)))


def _middle(values: Array) -> Array:
    """Sort the last axis and return its medians."""
    values.sort(axis=-1)  # for floats as fast as a partition
    half, odd = divmod(values.shape[-1], 2)
    if odd:
        return values[..., half]
    # halves: the sum of two large numbers overflows
    median: Array = 0.5 * values[..., half] + 0.5 * values[..., half - 1]
    return median


def _thin(group: Array, sample: int | None) -> Array:
    """Return evenly spaced entries of a group that is larger than a sample."""
    if sample is None or len(group) <= sample:
        return group
    thinned: Array = group[np.arange(sample) * len(group) // sample]
    return thinned


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
        norms = known.norms
        if self.sums:
            gradient, norms = rows_and_norms(gradient.sum(dim=1, keepdim=True))
        scores = self._nearness(gradient, norms, known.groups)
        classes = len(known.groups)
        if not self.hard:
            scores = merge_ties(scores, classes)
        elif classes > 2:
            scores = np.eye(classes, dtype=scores.dtype)[:, scores.argmax(axis=0)]
        else:
            scores = (scores >= 0).astype(scores.dtype)
        return torch.from_numpy(scores.T).to(gradient.device)

    def _nearness(self, rows: Tensor, norms: Tensor, groups: Sequence[Array]) -> Array:
        parts = self.parts(groups)
        centers = (self.centers(rows, part) for part in parts)
        scores, *others = (nearness(*compare(rows, norms, each)) for each in centers)
        for other in others:
            rest = np.concatenate(parts[0])
            scores[..., rest] = other[..., rest]
        return scores

    def parts(self, groups: Sequence[Array]) -> list[Sequence[Array]]:
        """Return the rows that centers are taken from: all, or both halves."""
        if not self.held_out:
            return [groups]
        second = [group[1::2] if len(group) > 1 else group for group in groups]
        return [[group[0::2] for group in groups], second]

    def centers(self, rows: Tensor, groups: Sequence[Array], parties: int = 1) -> Array:
        """Return the mean of each group of rows; parties are side by side."""
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

    def centers(self, rows: Tensor, groups: Sequence[Array], parties: int = 1) -> Array:
        """Return the median of each group of rows; parties are side by side."""
        if self.sample != "auto":
            return class_medians(rows, groups, self.sample)
        large = rows.numel() > _LARGE * parties
        if large and rows.device.type == "cpu" and min(map(len, groups)) >= _TRIPLES:
            return _remedians(rows, groups)
        return class_medians(rows, groups, _ENOUGH if large else None)
