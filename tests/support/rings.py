"""Handshakes in one process, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flower_vfl.alignment import (
    Alignment,
    Elements,
    Group,
    Member,
    PsuParty,
    RoundMessage,
    encode_ids,
    make_group,
    relay,
)
from flower_vfl.alignment.elements import Progress


class Counting(Group):
    """Another group that counts its exponentiations."""

    def __init__(self, group: Group) -> None:
        self.__dict__.update(group.__dict__)
        self.name, self.size, self.order = group.name, group.size, group.order
        self._chunk = group._chunk
        self.inner = group
        self.exponentiations = 0

    def random_key(self) -> int:
        return self.inner.random_key()

    def _hash_rows(self, messages: Sequence[bytes], rows: Elements) -> None:
        self.inner._hash_rows(messages, rows)

    def _power_rows(self, rows: Elements, key: int, target: Elements) -> None:
        self.inner._power_rows(rows, key, target)

    def _check_rows(self, rows: Elements) -> None:
        self.inner._check_rows(rows)

    def power(
        self, elements: Elements, key: int, progress: Progress | None = None
    ) -> Elements:
        self.exponentiations += len(elements)
        return super().power(elements, key, progress)


def make_members(
    sets: Sequence[Sequence[object]],
    kind: type[PsuParty] = PsuParty,
    group: str = "ristretto255",
    padding: int = 0,
    session: bytes = b"session",
) -> list[Member]:
    """Return one member per set, named p0, p1, ..., each with a group of its own."""
    ring = [f"p{number}" for number in range(len(sets))]
    return [
        Member(
            kind(
                name,
                ring,
                encode_ids(ids),
                Counting(make_group(group)),
                session,
                padding,
            )
        )
        for name, ids in zip(ring, sets, strict=True)
    ]


def align(
    sets: Sequence[Sequence[object]],
    kind: type[PsuParty] = PsuParty,
    group: str = "ristretto255",
    padding: int = 0,
    tap: Callable[[RoundMessage], None] | None = None,
) -> list[Alignment]:
    """Return the alignment of each party."""
    return [*relay(make_members(sets, kind, group, padding), tap).values()]


def texts(elements: Elements) -> list[bytes]:
    """Return the elements one by one."""
    return [row.tobytes() for row in elements]
