"""Checks of lists of elements, and how one is looked up in another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flower_vfl.errors import VerticalError

from .elements import Elements, is_ascending, order_of, texts

Positions = NDArray[np.int64]


class ListError(VerticalError, ValueError):
    """A list that the protocol does not allow: repeated, out of turn, a wrong count."""


def check_ascending(elements: Elements) -> None:
    """Refuse a list that is not sorted or that repeats an element."""
    if not is_ascending(elements):
        raise ListError("the list is not sorted or repeats an element")


def check_distinct(elements: Elements) -> None:
    """Refuse a list that repeats an element."""
    if not is_ascending(elements[order_of(elements)]):
        raise ListError("the list repeats an element")


def rows_of(elements: Elements, universe: Elements) -> Positions:
    """Return the row of each element in a sorted list, -1 where it is not there."""
    if not len(universe):
        return np.full(len(elements), -1, np.int64)
    rows, known = texts(elements), texts(universe)
    found = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    return np.where(known[found] == rows, found, -1).astype(np.int64)
