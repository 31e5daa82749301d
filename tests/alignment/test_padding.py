"""Dummy ids: how they blur an intersection, and what their number promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rings import align

from flower_vfl.alignment import encode_ids, padding_delta
from flower_vfl.alignment.ids import dummy_messages
from flower_vfl.errors import ConfigError


def test_padding_blurs_the_intersection_of_a_union() -> None:
    sets = [[*range(20)], [*range(10, 40)]]
    sizes = set()
    for _ in range(12):
        found = align(sets, padding=40)
        assert [len(each.dummies) for each in found] == [40, 40]
        assert found[0].counts == {"p0": 60, "p1": 70}
        sizes.add(60 + 70 - len(found[0].universe) - 10)
        real = set(found[0].positions) | set(found[1].positions)
        assert len(real) == 40  # the union of the real ids
        assert not real & {*found[0].dummies, *found[1].dummies}
    assert len(sizes) > 2 and all(0 <= shared <= 40 for shared in sizes)


@pytest.mark.parametrize("padding", [1, 10, 300, 1000])
def test_delta_follows_from_the_distribution_of_shared_dummies(padding: int) -> None:
    """Of two halves of a pool: comb(n, k) ways for the shared and for the others."""
    pairs = math.comb(2 * padding, padding)
    chances = [math.comb(padding, k) ** 2 / pairs for k in range(padding + 1)]
    for epsilon in (0.0, 0.1, 0.5):
        moved = [0.0, *(math.exp(epsilon) * chance for chance in chances)]
        pairs_of = zip([*chances, 0.0], moved, strict=True)
        expected = math.fsum(max(0.0, one - other) for one, other in pairs_of)
        assert padding_delta(padding, epsilon) == pytest.approx(expected, rel=1e-6)
    drawn = [len({*dummy_messages(40)} & {*dummy_messages(40)}) for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(20, abs=0.7)  # 6 standard errors
    assert np.std(drawn) == pytest.approx(np.sqrt(40 / 8), rel=0.25)


def test_dummies_are_a_random_half_of_the_pool() -> None:
    pool: set[bytes] = set()
    for _ in range(40):
        chosen = dummy_messages(5)
        assert len(set(chosen)) == 5
        pool |= set(chosen)
    assert len(pool) == 10
    assert not pool & set(encode_ids([*range(10), b"d", "d"]))
    with pytest.raises(ConfigError, match="padding"):
        dummy_messages(-1)


def test_delta_of_padding() -> None:
    # two of two dummies each, by hand: chances 1/2, 1/2 against the same moved by one
    assert padding_delta(1, 0.0) == pytest.approx(0.5)
    assert padding_delta(1, 5.0) == pytest.approx(0.5)  # no shared dummy: all is known
    assert padding_delta(0, 1.0) == 1.0
    deltas = [padding_delta(padding, 0.5) for padding in (10, 100, 1000)]
    assert deltas == sorted(deltas, reverse=True)
    assert padding_delta(1000, 0.5) < 1e-6
    with pytest.raises(ConfigError, match="epsilon"):
        padding_delta(5, -1)
