"""Solve torch's Mersenne twister for its state from normal numbers that it gave.

Every output word of the twister is a linear function over GF(2) of its state, and
three output words tell bits of each other: x[k+624] = x[k+397] + A(x[k], x[k+1]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

WORDS, MIDDLE, FIRST = 624, 397, 3  # FIRST: of the words within a generator's state
_UPPER, _LOWER, _MATRIX = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_ALL, _DIGITS = 0xFFFFFFFF, 24


@dataclass(frozen=True)
class Word:
    """The words that an output can be: one of them, and what may be added to it."""

    value: int
    basis: tuple[int, ...]


def twister(words: Sequence[int]) -> torch.Generator:
    """Return a generator whose 624 words of state are these ones."""
    found = torch.Generator()
    state = found.get_state()
    state.view(torch.int64)[FIRST : FIRST + WORDS] = torch.tensor(words)
    found.set_state(state)
    return found


def temper(x: int) -> int:
    """Return the output word of a word of state."""
    x ^= x >> 11
    x ^= (x << 7) & 0x9D2C5680
    x ^= (x << 15) & 0xEFC60000
    return x ^ x >> 18


@cache
def _untempered_bits() -> tuple[int, ...]:
    """Return the words of state whose output words have one bit each."""
    rows = [(temper(1 << j), 1 << j) for j in range(32)]
    for j in range(32):
        pivot = next(i for i in range(j, 32) if rows[i][0] >> j & 1)
        rows[j], rows[pivot] = rows[pivot], rows[j]
        image, source = rows[j]
        for i, row in enumerate(rows):
            if i != j and row[0] >> j & 1:
                rows[i] = row[0] ^ image, row[1] ^ source
    return tuple(source for _, source in rows)


def untemper(y: int) -> int:
    """Return the word of state of an output word."""
    found = 0
    for j, source in enumerate(_untempered_bits()):
        if y >> j & 1:
            found ^= source
    return found


def _twist(upper: int, lower: int) -> int:
    """Return what x[k] and x[k+1] contribute to x[k+624]."""
    mixed = (upper & _UPPER) | (lower & _LOWER)
    return mixed >> 1 ^ (_MATRIX if mixed & 1 else 0)


class Equations:
    """Linear equations over GF(2); bit 0 of a row is the right-hand side."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}  # by the highest bit

    def add(self, row: int) -> bool:
        """Add a row; return False if it contradicts the others."""
        while row > 1:
            other = self.rows.get(row.bit_length())
            if other is None:
                self.rows[row.bit_length()] = row
                return True
            row ^= other
        return row == 0

    def solution(self, unknowns: int) -> list[int]:
        """Return the unknowns; those that nothing is known about are 0."""
        found = 1  # bit 0 stands for the right-hand side
        for top in sorted(self.rows):
            others = self.rows[top] ^ (1 << top - 1)
            found |= ((others & found).bit_count() & 1) << top - 1
        return [found >> i + 1 & 1 for i in range(unknowns)]


def solve(
    words: Sequence[Word | None],
    relations: Sequence[int] | None = None,
    *,
    strict: bool = True,
) -> list[int] | None:
    """Return the output words that all relations allow, or None if there are none.

    Only the `relations` with these numbers are looked at, if given; words that none of
    them is about may be None. Without `strict` an equation that contradicts those
    before it is left out.
    """
    equations = Equations()
    start, count = [], 1
    for word in words:
        start.append(count)
        count += len(word.basis) if word is not None else 0
    for k in range(len(words) - WORDS) if relations is None else relations:
        constant, terms = 0, dict[int, int]()
        parts: tuple[tuple[int, Callable[[int], int]], ...] = (
            (k, lambda x: _twist(x, 0)),
            (k + 1, lambda x: _twist(0, x)),
            (k + MIDDLE, lambda x: x),
            (k + WORDS, lambda x: x),
        )
        for place, image in parts:
            word = words[place]
            assert word is not None
            constant ^= image(untemper(word.value))
            for i, vector in enumerate(word.basis):
                terms[start[place] + i] = image(untemper(vector))
        for j in range(32):
            row = constant >> j & 1
            for unknown, vector in terms.items():
                row |= (vector >> j & 1) << unknown
            if not equations.add(row) and strict:
                return None
    values = equations.solution(count - 1)
    found = []
    for word, first in zip(words, start, strict=True):
        value = 0 if word is None else word.value
        for i, vector in enumerate(() if word is None else word.basis):
            value ^= vector * values[first - 1 + i]
        found.append(value)
    return found


def _leading(low: int, high: int, digits: int) -> tuple[int, int]:
    """Return a number and how many low bits differ between two, of `digits` bits."""
    low, high = max(low, 0), min(high, (1 << digits) - 1)
    open_bits = (low ^ high).bit_length()
    return low >> open_bits << open_bits, open_bits


def _units(bits: range) -> tuple[int, ...]:
    return tuple(1 << i for i in bits)


def words_of_randn(normal: Tensor, error: float) -> list[Word]:
    """Return what ``torch.randn`` was made of: whole blocks of 16 float32 numbers.

    torch takes 24 bits of a word for a number, and makes number j and j + 8 of a block
    to a pair of normal ones. `error` is how far a normal number may be off.
    """
    found: list[Word] = []
    for block in normal.double().reshape(-1, 2, 8):
        halves: tuple[list[Word], list[Word]] = ([], [])
        for a, b in zip(*block.tolist(), strict=True):
            (r, turn), off = _polar(a, b), error * max(1.0, abs(a), abs(b))
            bounds = (
                (1 - _survival(r - off), 1 - _survival(r + off)),
                ((turn - off / (2 * math.pi * r)), (turn + off / (2 * math.pi * r))),
            )
            for words, (low, high) in zip(halves, bounds, strict=True):
                scale = 1 << _DIGITS
                whole = math.floor(low * scale), math.ceil(high * scale)
                value, unsure = _leading(*whole, _DIGITS)
                units = _units(range(unsure)) + _units(range(_DIGITS, 32))
                words.append(Word(value, units))
        found += halves[0] + halves[1]
    return found


def words_of_noise(first: Tensor, second: Tensor, error: float) -> list[Word]:
    """Return what the two halves of ``Noise.normal`` would be made of.

    A word of the first half gives a radius, and one of the second half the angle. The
    words come in that order. The sign of the first ones is not seen.
    """
    radii, angles = [], []
    for a, b in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True):
        (r, turn), off = _polar(a, b), error * max(1.0, abs(a), abs(b))
        low, high = _survival(r + off) * 2**31, _survival(r - off) * 2**31
        value, unsure = _leading(math.floor(low) - 64, math.ceil(high) + 64, 31)
        radii.append(Word(value, (_ALL, *_units(range(unsure)))))
        around = off / (2 * math.pi * r)
        low, high = (turn - around) * 2**32 - 256, (turn + around) * 2**32 + 256
        value, unsure = _leading(math.floor(low), math.ceil(high), 32)
        angles.append(Word(value, _units(range(unsure))))
    return radii + angles


def _polar(a: float, b: float) -> tuple[float, float]:
    """Return the radius of a pair, and its angle in turns from 0 to 1."""
    return math.hypot(a, b), math.atan2(b, a) / (2 * math.pi) % 1.0


def _survival(radius: float) -> float:
    return math.exp(-(max(radius, 0.0) ** 2) / 2)
