"""What all scores share: rows in a safe precision, and ties that are ties.

Products with a matrix of rows are torch's. What is left is a few numbers per row, for
which numpy on the host takes a third of the time (``benchmarks/meter_cost.py``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.rows import row_norms, to_rows

Array = NDArray[Any]
_SMALL = 2**14  # entries; up to here double precision costs next to nothing


def as_rows(gradient: Tensor) -> Tensor:
    """Return a gradient of any shape as a matrix with one row per example.

    Half precision becomes single precision; small gradients become double precision.
    """
    if not gradient.is_floating_point() or gradient.ndim == 0:
        raise ConfigError(
            "a gradient must have one row of floating point numbers per example, got "
            f"{gradient.dtype} of the shape {tuple(gradient.shape)}"
        )
    rows = to_rows(gradient)
    # Every product with a slice of columns is slow.
    return rows.double() if rows.numel() <= _SMALL else rows.contiguous()


def finite_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of every row; refuse numbers that are not finite."""
    norms = row_norms(rows)
    if not math.isfinite(float(norms.sum())):
        bad = int((~torch.isfinite(rows)).sum())
        if bad:
            raise ConfigError(f"{bad} numbers of the gradient are missing or infinite")
    return norms


def rows_and_norms(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and their norms, in a precision that distances and cosines need."""
    rows = as_rows(gradient)
    norms = finite_norms(rows)
    if norms.dtype == torch.float32 and _clustered(rows, to_numpy(norms)):
        norms = finite_norms(rows.double())
    return rows.to(norms.dtype), norms


def _clustered(rows: Tensor, norms: Array) -> bool:
    """Return whether rows are close together and far from zero.

    Their differences need more digits than single precision has.
    """
    most = 0.99 * float(np.square(norms).mean())
    if float(norms.mean()) ** 2 <= most:  # the norm of the mean row is not larger
        return False
    return float(rows.mean(dim=0).square().sum()) > most


def to_numpy(tensor: Tensor) -> Array:
    """Return a tensor's numbers on the host."""
    array: Array = tensor.cpu().numpy()
    return array


def products(rows: Tensor, vectors: Array) -> Array:
    """Return the product of each vector with each row, (vectors, rows)."""
    return to_numpy(torch.from_numpy(vectors).to(rows) @ rows.T)


def round_scores(scores: Array, largest: float) -> Array:
    """Round scores to a small part of the largest one, so that ties are ties.

    Rows on a line, such as those below a linear top model, have a cosine of ±1, and
    beyond the centers the difference of their distances is constant. Without this, the
    last bit would decide the order of such rows.
    """
    least = np.finfo(scores.dtype).tiny * 2.0**20
    unit = max(largest, least) * (2.0**-30 if scores.dtype == np.float64 else 2.0**-17)
    part = scores.dtype.type(unit)
    rounded: Array = np.rint(scores / part) * part
    return rounded
