"""Combinations of settings of which `make test` runs a part, `make test-all` all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]  # the number of a value on each axis


def covering(
    *axes: Sequence[Any],
    strength: int = 2,
    allowed: Callable[..., bool] = lambda *values: True,
) -> list[Any]:
    """Return all combinations as parameters; those that a cover leaves out are extra.

    Every `strength` values of different axes occur together in one that is not extra,
    and no value much more often than others.
    """

    def values(row: Row) -> list[Any]:
        return [axis[number] for axis, number in zip(axes, row, strict=True)]

    def parts(row: Row) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), strength))

    every = product(*(range(len(axis)) for axis in axes))
    rows = [row for row in every if allowed(*values(row))]
    missing = set().union(*map(parts, rows))
    kept, used = set[Row](), Counter[tuple[int, int]]()
    while missing:
        best = max(
            rows,
            key=lambda row: (
                len(missing & parts(row)),
                -sum(used[value] for value in enumerate(row)),
            ),
        )
        missing -= parts(best)
        used.update(enumerate(best))
        kept.add(best)
    return [
        pytest.param(*values(row), marks=() if row in kept else pytest.mark.extra)
        for row in rows
    ]
