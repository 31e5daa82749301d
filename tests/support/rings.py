"""Handshakes in one process, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flower_vfl.alignment import AlignedIds, Identity, encode_ids
from flower_vfl.alignment.channel import SecureChannel
from flower_vfl.alignment.elements import Elements, Group
from flower_vfl.alignment.groups import make_group
from flower_vfl.alignment.handshake import Member
from flower_vfl.alignment.messages import HandshakeConfig, Header, RoundMessage
from flower_vfl.alignment.psu import PsuParty

NAMES = ("a", "b", "c")
CONFIG = HandshakeConfig(b"s" * 16, "psu", "ristretto255", NAMES, 0, 1 << 20)
AGREED = CONFIG.agreed()
HEADER = Header("first", "a", 1, "a", "b", 3)


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

    def power(self, elements: Elements, key: int) -> Elements:
        self.exponentiations += len(elements)
        return super().power(elements, key)


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


def relay(
    members: Sequence[Member], tap: Callable[[RoundMessage], None] | None = None
) -> dict[str, AlignedIds]:
    """Return the aligned ids of every party; the tap sees every message."""
    by_name = {member.name: member for member in members}
    messages = [message for member in members for message in member.start()]
    while messages:
        following: list[RoundMessage] = []
        for message in messages:
            if tap:
                tap(message)
            following += by_name[message.header.receiver].receive(message)
        messages = following
    found = {member.name: member.aligned for member in members}
    assert None not in found.values()
    return found  # type: ignore[return-value]


def align(
    sets: Sequence[Sequence[object]],
    kind: type[PsuParty] = PsuParty,
    group: str = "ristretto255",
    padding: int = 0,
    tap: Callable[[RoundMessage], None] | None = None,
) -> list[AlignedIds]:
    """Return the aligned ids of each party."""
    return [*relay(make_members(sets, kind, group, padding), tap).values()]


def rows_as_bytes(elements: Elements) -> list[bytes]:
    """Return the elements one by one."""
    return [row.tobytes() for row in elements]


def make_channels(
    names: Sequence[str] = NAMES, session: bytes = b"session", **changes: Any
) -> dict[str, SecureChannel]:
    """Return channels of parties that pinned each other and exchanged keys."""
    identities = {name: Identity() for name in names}
    channels = {
        name: SecureChannel(
            name,
            session,
            changes.get(name, AGREED),
            identities[name],
            {n: each.public for n, each in identities.items() if n != name},
        )
        for name in names
    }
    hellos = [each.hello() for each in channels.values()]
    for each in channels.values():
        each.exchange_keys(hellos)
    return channels
