"""A party's side of the handshake: parts, and what is saved between two messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from flower_vfl.alignment import (
    AlignmentSettings,
    Identity,
    Sealed,
    SealError,
    encode_ids,
)
from flower_vfl.alignment.handshake import Handshake, Invitation
from flower_vfl.alignment.messages import (
    pack_hellos,
    pack_invitation,
    pack_parts,
    unpack_hellos,
    unpack_invitation,
    unpack_parts,
)
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.protocol.messages import Content

IDS: dict[str, list[object]] = {
    "a": [f"person-{n}" for n in range(9)],
    "b": [f"person-{n}" for n in range(5, 16)],
    "c": [f"person-{n}" for n in range(3, 12, 2)],
}
LIMIT = 200


def begin(
    method: str = "psu", names: str = "abc", padding: int = 0, pins: bool = True
) -> tuple[dict[str, Handshake], dict[str, AlignmentSettings]]:
    """Return one side per party, and the settings of each."""
    identities = {name: Identity() for name in names}
    keys = {name: identity.public for name, identity in identities.items()}
    trusting = AlignmentSettings(trust_server=True)
    own = {
        name: AlignmentSettings(identities[name], keys) if pins else trusting
        for name in names
    }
    invitation = Invitation(
        b"s" * 16, method, "ristretto255", tuple(names), padding, part_bytes=64
    )
    sides = {
        name: Handshake(name, invitation, own[name], encode_ids(IDS[name]))
        for name in names
    }
    return sides, own


def carry(
    sides: dict[str, Handshake], own: dict[str, AlignmentSettings], saved: bool
) -> dict[str, Handshake]:
    """Carry all letters; with saved, every party is a new object at every message."""

    def renew(name: str) -> Handshake:
        if saved:
            data = sides[name].save()
            assert b"person-" not in data
            sides[name] = Handshake.restore(data, name, own[name], IDS[name])
        return sides[name]

    hellos = [renew(name).hello() for name in sides]
    boxes: dict[str, list[Sealed]] = {name: [] for name in sides}

    def post(parts: Sequence[Sealed]) -> None:
        for part in parts:
            boxes[part.header.receiver].append(part)

    for name in sides:
        renew(name).meet(hellos)
        post(sides[name].give(LIMIT))
    while any(boxes.values()) or any(side.has_more for side in sides.values()):
        for name in sides:
            parts, boxes[name] = boxes[name][:2], boxes[name][2:]
            renew(name).take(parts)
            post(sides[name].give(LIMIT))
    return sides


@pytest.mark.parametrize("method", ["psu", "psi"])
@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("saved", [False, True])
def test_a_handshake_can_be_saved_at_every_message(
    method: str, names: str, padding: int, saved: bool
) -> None:
    sides, own = begin(method, names, padding, pins=not saved)
    kept = {n: side.finish() for n, side in carry(sides, own, saved).items()}
    assert len({each.fingerprint for each in kept.values()}) == 1
    ids = [set(IDS[name]) for name in names]
    every = set.union(*ids) if method == "psu" else set.intersection(*ids)
    found: dict[int, object] = {}
    for name, each in kept.items():
        for one, row in zip(IDS[name], each.alignment.positions, strict=True):
            assert (row >= 0) == (one in every)
            if row >= 0:
                assert found.setdefault(int(row), one) == one
    assert len(found) == len(set(found.values())) == len(every)


def test_a_restored_party_writes_the_same_letters_again() -> None:
    """A seal's number is never used for two contents, whatever is done again."""
    sides, own = begin(padding=2)
    hellos = [side.hello() for side in sides.values()]
    data = sides["a"].save()
    twice = []
    for _ in range(2):
        side = Handshake.restore(data, "a", own["a"], IDS["a"])
        side.meet(hellos)
        twice.append(side.give(1 << 20))
    assert twice[0] == twice[1]
    assert len(twice[0]) > 4


def test_the_end_leaves_no_key() -> None:
    sides, own = begin("psu", "ab")
    carry(sides, own, saved=False)
    for name, side in sides.items():
        side.finish()
        assert not side._seals._keys
        assert side._seals._fresh is None
        assert side._member.party._keys is None
        other = Handshake.restore(side.save(), name, own[name], IDS[name])
        assert other._member.party._keys is None
        assert not other._seals._keys
        assert other.finish().fingerprint == side.finish().fingerprint


def test_a_lasting_key_is_not_saved() -> None:
    sides, own = begin("psu", "ab")
    identity = own["a"].identity
    assert identity is not None
    secret = identity.private_bytes()
    data = sides["a"].save()
    assert secret not in data
    assert secret.hex().encode() not in data


def test_stages_out_of_turn() -> None:
    sides, _ = begin("psu", "ab")
    hellos = [side.hello() for side in sides.values()]
    with pytest.raises(PartyError, match="'b': its first list has not arrived at 'a'"):
        sides["a"].finish()
    sides, _ = begin("psu", "ab")
    hellos = [side.hello() for side in sides.values()]
    with pytest.raises(PartyError, match=r"got the hellos of \['a'\]"):
        sides["a"].meet(hellos[:1])
    sides["a"].meet(hellos)
    with pytest.raises(PartyError, match="got the hellos of"):
        sides["a"].meet(hellos)
    with pytest.raises(SealError, match="not for 'b'"):
        sides["b"].take(sides["a"].give(LIMIT))  # b has not met a


def test_parts_keep_within_the_limit() -> None:
    for limit, least in ((80, 1), (160, 2), (500, 6)):
        side = _met()
        assert len(side.give(limit)) == least
        size = 0
        while side.has_more:
            size = sum(len(part.content) for part in side.give(limit))
            assert size <= limit
        assert size
    side = _met()
    assert len(side.give(1)) == 1  # one in any case


def _met() -> Handshake:
    sides, _ = begin("psu", "ab")
    hellos = [side.hello() for side in sides.values()]
    sides["a"].meet(hellos)
    return sides["a"]


def test_an_invitation_that_no_handshake_can_have() -> None:
    good = Invitation(b"s" * 16, "psu", "ristretto255", ("a", "b"), 0, 64)
    for change, problem in (
        ({"method": "none"}, "unknown alignment method 'none'"),
        ({"group": "x25519"}, "unknown group 'x25519'"),
        ({"session": b"short"}, "needs a random name"),
    ):
        with pytest.raises(ConfigError, match=problem):
            replace(good, **change)  # type: ignore[arg-type]
    for change in ({"ring": ("b", "c")}, {"ring": ("a", "a")}, {"padding": -1}):
        with pytest.raises(ConfigError):
            Handshake(
                "a",
                replace(good, **change),  # type: ignore[arg-type]
                AlignmentSettings(trust_server=True),
                [],
            )


def test_messages_bring_what_was_packed() -> None:
    sides, _ = begin("psu", "ab")
    hellos = [side.hello() for side in sides.values()]
    assert unpack_hellos(Content(pack_hellos(hellos))) == hellos
    invitation = sides["a"].invitation
    assert unpack_invitation(Content(pack_invitation(invitation))) == invitation
    sides["a"].meet(hellos)
    parts = sides["a"].give(1 << 20)
    assert unpack_parts(Content(pack_parts(parts))) == parts


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"heads": ["[]"], "contents": [b""]},
        {"heads": ["no json"], "contents": [b""]},
        {"heads": ['["first","a",1,"a","b",3,0,1,0]'], "contents": []},
        {"heads": ['["first","a",1,"a","b",3,0,1,-1]'], "contents": [b""]},
        {"heads": ['["first","a",true,"a","b",3,0,1,0]'], "contents": [b""]},
        {"heads": ['["first","a",1e400,"a","b",3,0,1,0]'], "contents": [b""]},
        {"heads": [7], "contents": [b""]},
        {"heads": "[]", "contents": b""},
    ],
)
def test_parts_that_are_none(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        unpack_parts(Content(config))  # type: ignore[arg-type]
