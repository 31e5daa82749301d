"""Scores from norms and products: what is left of an attack once rows are gone.

These are the formulas of ``scores`` for many attacks on many parties at once. A batch
of gradients has been reduced to a few numbers per row, for which numpy on the host has
much less overhead than torch. Shapes: P parties, A attacks, k known vectors or C
classes, B rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def cosines(norms: Array, products: Array, lengths: Array) -> Array:
    """Return cosines, P×A×k×B; 0 where a vector has no length."""
    both = norms * lengths[..., None]
    np.maximum(both, np.finfo(both.dtype).tiny, out=both)
    return _round(products / both, 1.0)


def distance_scores(squares: Array, products: Array, lengths: Array) -> Array:
    """Return how much nearer rows are to the center of a class than to the others.

    The difference of two distances is computed as the difference of their squares over
    their sum, because the first of those is linear in the row and loses no digits.
    """
    relative = products * -2.0  # becomes ‖g−μ‖² − ‖g‖²
    relative += np.square(lengths)[..., None]
    distances = relative + squares
    np.maximum(distances, 0.0, out=distances)
    np.sqrt(distances, out=distances)
    if distances.shape[2] == 2:
        gap = relative[:, :, :1] - relative[:, :, 1:]
        both = distances[:, :, :1] + distances[:, :, 1:]
        gap /= np.maximum(both, np.finfo(both.dtype).tiny, out=both)
        return gap
    two = np.partition(distances, 1, axis=2)[:, :, :2]
    nearest = distances.argmin(axis=2, keepdims=True)
    own = np.arange(distances.shape[2])[:, None]
    others: Array = np.where(nearest == own, two[:, :, 1:], two[:, :, :1])
    others -= distances
    return others


def merge_ties(scores: Array) -> Array:
    """Round the scores of every attack; see :func:`.scores.merge_ties`."""
    largest = np.abs(scores).max(axis=(2, 3), keepdims=True)
    return _round(scores, np.maximum(largest, np.finfo(scores.dtype).tiny * 2.0**20))


def _round(scores: Array, largest: Array | float) -> Array:
    unit = largest * (2.0**-30 if scores.dtype == np.float64 else 2.0**-17)
    scores /= unit
    np.rint(scores, out=scores)
    scores *= unit
    return scores


def one_hot(scores: Array) -> Array:
    """Turn scores into 1 for the chosen class and 0 for the others."""
    if scores.shape[-2] == 1:
        return (scores >= 0).astype(scores.dtype)
    chosen = scores.argmax(axis=-2, keepdims=True)
    numbers = np.arange(scores.shape[-2])[:, None]
    hits: Array = chosen == numbers
    return hits.astype(scores.dtype)
