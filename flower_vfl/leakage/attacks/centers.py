"""Class means and class medians: what the mean and the median attack know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.kernels import Array

CenterKind = Literal["mean", "median"]


def class_centers(kind: CenterKind, rows: Tensor, labels: Tensor) -> Tensor:
    """Return the center of every class from 0 to the largest label."""
    numbers: Array = labels.detach().cpu().numpy().reshape(-1).astype(np.int64)
    if len(numbers) != len(rows) or not len(rows):
        raise ConfigError(f"got {len(numbers)} labels for {len(rows)} rows")
    groups = [np.flatnonzero(numbers == c) for c in range(max(numbers.max(), 1) + 1)]
    empty = [c for c, group in enumerate(groups) if not len(group)]
    if empty:
        raise ConfigError(f"there is no row of class {empty[0]} to take a {kind} from")
    if kind == "median":
        return torch.from_numpy(group_medians([rows], groups)).to(rows)
    places = [torch.from_numpy(group).to(rows.device) for group in groups]
    return torch.stack([rows.index_select(0, p).mean(dim=0) for p in places])


def group_medians(
    matrices: Sequence[Tensor], groups: Sequence[Array], sample: int | None = None
) -> Array:
    """Return the median of every coordinate of every group of rows."""
    chosen = [_thin(group, sample) for group in groups]
    sizes, order = [len(group) for group in chosen], np.concatenate(chosen)
    if matrices[0].device.type != "cpu":
        return _medians_on_device(matrices, order, sizes)
    width = sum(matrix.shape[1] for matrix in matrices)
    parts = [matrix.numpy() for matrix in matrices]
    columns = np.empty((width, len(order)), dtype=np.result_type(*parts))
    start = 0
    for part in parts:
        columns[start : start + part.shape[1]] = part.take(order, axis=0).T
        start += part.shape[1]
    if len(set(sizes)) == 1:  # all groups in one call
        return _select(columns.reshape(width, len(sizes), -1)).T
    ends = np.cumsum(sizes)
    return np.stack([_select(part) for part in np.split(columns, ends[:-1], axis=1)])


def _select(values: Array) -> Array:
    """Return medians along the last axis; changes the order of the values.

    Several times faster than a sort, or than torch.median.
    """
    size = values.shape[-1]
    half = size // 2
    values.partition(half, axis=-1)
    upper: Array = values[..., half]
    if size % 2:
        return upper
    # Halves first: the sum of two large numbers overflows.
    medians: Array = 0.5 * upper + 0.5 * values[..., :half].max(axis=-1)
    return medians


def _medians_on_device(
    matrices: Sequence[Tensor], order: Array, sizes: Sequence[int]
) -> Array:
    place = torch.from_numpy(order).to(matrices[0].device)
    joined = torch.cat([matrix.index_select(0, place) for matrix in matrices], dim=1)
    ordered = [part.sort(dim=0).values for part in torch.split(joined, list(sizes))]
    medians = [
        torch.lerp(part[(size - 1) // 2], part[size // 2], 0.5)
        for part, size in zip(ordered, sizes, strict=True)
    ]
    result: Array = torch.stack(medians).cpu().numpy()
    return result


def _thin(group: Array, sample: int | None) -> Array:
    """Return evenly spaced entries of a group that is larger than a sample."""
    if sample is None or len(group) <= sample:
        return group
    thinned: Array = group[np.arange(sample) * len(group) // sample]
    return thinned
