"""Class means and class medians: what the mean and the median attack know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError

CenterKind = Literal["mean", "median"]


def class_centers(kind: CenterKind, rows: Tensor, labels: Tensor) -> Tensor:
    """Return the center of every class from 0 to the largest label.

    Parameters
    ----------
    kind : {"mean", "median"}
        The mean, or the median of every coordinate.
    rows : Tensor
        B×d.
    labels : Tensor
        Class numbers; every class must occur.
    """
    numbers = labels.detach().reshape(-1).to(rows.device).long()
    if len(numbers) != len(rows) or not len(rows):
        raise ConfigError(f"got {len(numbers)} labels for {len(rows)} rows")
    groups = [(numbers == c).nonzero()[:, 0] for c in range(int(numbers.max()) + 1)]
    empty = [c for c, group in enumerate(groups) if not len(group)]
    if empty or len(groups) < 2:
        missing = empty[0] if empty else 1
        raise ConfigError(f"there is no row of class {missing} to take a {kind} from")
    if kind == "median":
        return group_medians(rows, groups)
    return group_means(rows, torch.stack([numbers == c for c in range(len(groups))]))


def group_means(rows: Tensor, member: Tensor) -> Tensor:
    """Return the mean of every group of rows.

    Parameters
    ----------
    rows : Tensor
        B×d.
    member : Tensor
        Which rows are in which group, groups×B, as 0 and 1 of any type.
    """
    weights = member.to(rows.dtype)
    return (weights @ rows).div_(weights.sum(dim=1, keepdim=True))


def group_medians(
    rows: Tensor | Sequence[Tensor], groups: Sequence[Tensor], sample: int | None = None
) -> Tensor:
    """Return the median of every coordinate of every group of rows.

    Parameters
    ----------
    rows : Tensor | Sequence[Tensor]
        B×d, or several such matrices side by side.
    groups : Sequence[Tensor]
        Row numbers of each group; no group is empty.
    sample : int | None (default: None)
        Take at most that many evenly spaced rows of a group; None takes all.
    """
    chosen = [_thin(group, sample) for group in groups]
    sizes, order = [len(group) for group in chosen], torch.cat(chosen)
    parts = [rows] if isinstance(rows, Tensor) else rows
    columns = torch.cat([part.index_select(0, order).T for part in parts])
    if columns.device.type == "cpu":
        return torch.from_numpy(_medians_cpu(columns.numpy(), sizes))
    ordered = [part.sort(dim=1).values for part in torch.split(columns, sizes, dim=1)]
    return torch.stack(
        [
            torch.lerp(part[:, (size - 1) // 2], part[:, size // 2], 0.5)
            for part, size in zip(ordered, sizes, strict=True)
        ]
    )


def _medians_cpu(columns: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """Select in place: several times faster than a sort, or than torch.median."""
    if len(set(sizes)) == 1:  # all groups in one call
        return _select(columns.reshape(len(columns), len(sizes), -1)).T
    ends = np.cumsum(sizes)
    return np.stack([_select(part) for part in np.split(columns, ends[:-1], axis=1)])


def _select(values: NDArray[Any]) -> NDArray[Any]:
    """Return medians along the last axis; changes the order of the values."""
    size = values.shape[-1]
    half = size // 2
    values.partition(half, axis=-1)
    upper = values[..., half]
    if size % 2:
        return upper
    # Halves first: the sum of two large numbers overflows.
    medians: NDArray[Any] = 0.5 * upper + 0.5 * values[..., :half].max(axis=-1)
    return medians


def _thin(group: Tensor, sample: int | None) -> Tensor:
    if sample is None or len(group) <= sample:
        return group
    steps = torch.arange(sample, device=group.device) * len(group) // sample
    return group.index_select(0, steps)
