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
    groups = [row_numbers(numbers == c) for c in range(int(numbers.max()) + 1)]
    empty = [c for c, group in enumerate(groups) if not len(group)]
    if empty or len(groups) < 2:
        missing = empty[0] if empty else 1
        raise ConfigError(f"there is no row of class {missing} to take a {kind} from")
    if kind == "median":
        return group_medians(rows, groups)
    member = torch.stack([numbers == c for c in range(len(groups))]).to(rows.dtype)
    return group_means(rows, member, member.sum(dim=1, keepdim=True))


def row_numbers(mask: Tensor) -> Tensor:
    """Return where a mask is true.

    Parameters
    ----------
    mask : Tensor
        One entry per row.
    """
    if mask.device.type == "cpu":  # a fraction of the time of torch.nonzero
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]


def group_means(rows: Tensor, member: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of every group of rows.

    Parameters
    ----------
    rows : Tensor
        B×d.
    member : Tensor
        Which rows are in which group, as 0 and 1, groups×B.
    sizes : Tensor
        Number of rows of each group, groups×1.
    """
    return (member.to(rows.dtype) @ rows).div_(sizes)


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
    parts = [rows] if isinstance(rows, Tensor) else rows
    chosen = [_thin(group, sample) for group in groups]
    sizes = [group.shape[0] for group in chosen]
    order = torch.cat(chosen)
    if order.device.type == "cpu":
        matrices = [part.numpy() for part in parts]
        return torch.from_numpy(_medians_cpu(matrices, order.numpy(), sizes))
    columns = torch.cat([part.index_select(0, order) for part in parts], dim=1)
    ordered = [part.sort(dim=0).values for part in torch.split(columns, sizes)]
    return torch.stack(
        [
            torch.lerp(part[(size - 1) // 2], part[size // 2], 0.5)
            for part, size in zip(ordered, sizes, strict=True)
        ]
    )


def _medians_cpu(
    matrices: Sequence[NDArray[Any]], order: NDArray[Any], sizes: Sequence[int]
) -> NDArray[Any]:
    """Select in place: several times faster than a sort, or than torch.median."""
    width = sum(matrix.shape[1] for matrix in matrices)
    columns = np.empty((width, len(order)), dtype=np.result_type(*matrices))
    start = 0
    for matrix in matrices:
        columns[start : start + matrix.shape[1]] = matrix.take(order, axis=0).T
        start += matrix.shape[1]
    if len(set(sizes)) == 1:  # all groups in one call
        return _select(columns.reshape(width, len(sizes), -1)).T
    parts = np.split(columns, np.cumsum(sizes)[:-1], axis=1)
    return np.stack([_select(part) for part in parts])


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
    """Return evenly spaced entries of a group that is larger than a sample."""
    size = group.shape[0]
    if sample is None or size <= sample:
        return group
    steps = torch.arange(sample, device=group.device).mul_(size)
    return group.index_select(0, steps.div_(sample, rounding_mode="floor"))
