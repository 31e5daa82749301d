"""Gradients as matrices with one row per example: shapes, norms, checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flower_vfl.errors import PartyError


def to_rows(gradient: Tensor) -> Tensor:
    """Return a gradient of any shape as a matrix, half precision as single."""
    count = len(gradient) if gradient.ndim else 1
    rows = gradient.detach().reshape(count, math.prod(gradient.shape[1:]))
    half = rows.dtype in (torch.float16, torch.bfloat16)
    return rows.float() if half else rows


def within_range(low: float, high: float) -> bool:
    """Return whether squares of single-precision norms neither vanish nor overflow."""
    return low >= 1e-15 and high <= 1e15


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of every row, also of very small and large ones.

    Single precision is many times faster than double, so the norms are computed again
    only where squares may have vanished or overflowed. Then they are doubles.
    """
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    if not rows.numel() or within_range(*(float(end) for end in torch.aminmax(norms))):
        return norms
    if rows.dtype != torch.float64:
        wide: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return wide
    largest = rows.abs().amax(dim=1, keepdim=True)
    largest = largest.clamp_min(torch.finfo(rows.dtype).tiny)
    norms = torch.linalg.vector_norm(rows / largest, dim=1)
    return norms * largest.squeeze(1)


def check_finite(
    tensor: Tensor, party: str, what: str, remedy: str, step: int | None
) -> None:
    """Raise if a tensor holds a NaN or an infinite entry."""
    # A sum is several times cheaper than looking at each entry, and finite if all
    # are; only a sum that overflowed needs the second look.
    if math.isfinite(tensor.sum().item()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        problem = f"{what} has {bad} NaN or infinite of {tensor.numel()} entries"
        raise PartyError(party, problem, remedy, step)
