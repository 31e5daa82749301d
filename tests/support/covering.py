"""Combinations of settings of which `make test` runs a part, `make test-all` all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], strength: int = 2) -> list[Any]:
    """Return all combinations as parameters; those that a cover leaves out are extra.

    Every `strength` values of different axes occur together in one that is not extra.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))
    together = list(combinations(range(len(axes)), strength))

    def parts(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return {tuple((axis, row[axis]) for axis in chosen) for chosen in together}

    kept: set[tuple[int, ...]] = set()
    missing = set().union(*map(parts, rows))
    while missing:
        best = max(rows, key=lambda row: len(missing & parts(row)))
        missing -= parts(best)
        kept.add(best)
    return [
        pytest.param(
            *(axis[number] for axis, number in zip(axes, row, strict=True)),
            marks=() if row in kept else pytest.mark.extra,
        )
        for row in rows
    ]
