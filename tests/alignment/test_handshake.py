"""A party's side of the handshake: chunks, and what is saved between two messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from covering import covering

from flower_vfl.alignment import AlignmentSettings, Identity, encode_ids
from flower_vfl.alignment.channel import ChannelError
from flower_vfl.alignment.handshake import Handshake
from flower_vfl.alignment.messages import (
    EncryptedChunk,
    HandshakeConfig,
    pack_chunks,
    pack_handshake,
    pack_hellos,
    unpack_chunks,
    unpack_handshake,
    unpack_hellos,
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
    config = HandshakeConfig(
        b"s" * 16, method, "ristretto255", tuple(names), padding, chunk_bytes=64
    )
    sides = {
        name: Handshake(name, config, own[name], encode_ids(IDS[name]))
        for name in names
    }
    return sides, own


def relay_all(
    sides: dict[str, Handshake], own: dict[str, AlignmentSettings], saved: bool
) -> dict[str, Handshake]:
    """Relay all chunks; with saved, every party is a new object at every message."""

    def renew(name: str) -> Handshake:
        if saved:
            data = sides[name].save()
            assert b"person-" not in data
            sides[name] = Handshake.restore(data, name, own[name], IDS[name])
        return sides[name]

    hellos = [renew(name).hello() for name in sides]
    queues: dict[str, list[EncryptedChunk]] = {name: [] for name in sides}

    def queue(chunks: Sequence[EncryptedChunk]) -> None:
        for chunk in chunks:
            queues[chunk.header.receiver].append(chunk)

    for name in sides:
        renew(name).exchange_keys(hellos)
        queue(sides[name].next_chunks(LIMIT))
    while any(queues.values()) or any(side.has_more for side in sides.values()):
        for name in sides:
            chunks, queues[name] = queues[name][:2], queues[name][2:]
            renew(name).receive(chunks)
            queue(sides[name].next_chunks(LIMIT))
    return sides


@pytest.mark.parametrize(
    ("method", "names", "padding", "saved"),
    covering(("psu", "psi"), ("ab", "abc"), (0, 3), (False, True)),
)
def test_a_handshake_can_be_saved_at_every_message(
    method: str, names: str, padding: int, saved: bool
) -> None:
    sides, own = begin(method, names, padding, pins=not saved)
    kept = {n: side.finish() for n, side in relay_all(sides, own, saved).items()}
    assert len({each.fingerprint for each in kept.values()}) == 1
    ids = [set(IDS[name]) for name in names]
    every = set.union(*ids) if method == "psu" else set.intersection(*ids)
    found: dict[int, object] = {}
    for name, each in kept.items():
        for one, row in zip(IDS[name], each.aligned.positions, strict=True):
            assert (row >= 0) == (one in every)
            if row >= 0:
                assert found.setdefault(int(row), one) == one
    assert len(found) == len(set(found.values())) == len(every)


def test_a_restored_party_makes_the_same_chunks_again() -> None:
    """No nonce is used for two contents, whatever is repeated."""
    sides, own = begin(padding=2)
    hellos = [side.hello() for side in sides.values()]
    data = sides["a"].save()
    twice = []
    for _ in range(2):
        side = Handshake.restore(data, "a", own["a"], IDS["a"])
        side.exchange_keys(hellos)
        twice.append(side.next_chunks(1 << 20))
    assert twice[0] == twice[1]
    assert len(twice[0]) > 4


def test_the_end_leaves_no_key() -> None:
    sides, own = begin("psu", "ab")
    relay_all(sides, own, saved=False)
    for name, side in sides.items():
        side.finish()
        assert not side._channel._keys
        assert side._channel._fresh is None
        assert side._member.party._keys is None
        other = Handshake.restore(side.save(), name, own[name], IDS[name])
        assert other._member.party._keys is None
        assert not other._channel._keys
        assert other.finish().fingerprint == side.finish().fingerprint


def test_a_long_term_key_is_not_saved() -> None:
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
        sides["a"].exchange_keys(hellos[:1])
    sides["a"].exchange_keys(hellos)
    with pytest.raises(PartyError, match="got the hellos of"):
        sides["a"].exchange_keys(hellos)
    with pytest.raises(ChannelError, match="not for 'b'"):
        sides["b"].receive(sides["a"].next_chunks(LIMIT))  # b has no keys yet


def test_chunks_keep_within_the_limit() -> None:
    for limit, least in ((80, 1), (160, 2), (500, 6)):
        side = _with_keys()
        assert len(side.next_chunks(limit)) == least
        size = 0
        while side.has_more:
            size = sum(len(chunk.content) for chunk in side.next_chunks(limit))
            assert size <= limit
        assert size
    side = _with_keys()
    assert len(side.next_chunks(1)) == 1  # one in any case


def _with_keys() -> Handshake:
    sides, _ = begin("psu", "abc")
    hellos = [side.hello() for side in sides.values()]
    sides["a"].exchange_keys(hellos)
    return sides["a"]


def test_configs_that_are_refused() -> None:
    good = HandshakeConfig(b"s" * 16, "psu", "ristretto255", ("a", "b"), 0, 64)
    for change, problem in (
        ({"method": "none"}, "unknown alignment method 'none'"),
        ({"group": "x25519"}, "unknown group 'x25519'"),
        ({"session": b"short"}, "needs a random name"),
        ({"padding": 1 << 40}, "padding or the chunk size is out of range"),
        ({"chunk_bytes": 0}, "padding or the chunk size is out of range"),
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
    config = sides["a"].config
    assert unpack_handshake(Content(pack_handshake(config))) == config
    sides["a"].exchange_keys(hellos)
    chunks = sides["a"].next_chunks(1 << 20)
    assert unpack_chunks(Content(pack_chunks(chunks))) == chunks


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"headers": ["[]"], "contents": [b""]},
        {"headers": ["no json"], "contents": [b""]},
        {"headers": ['["first","a",1,"a","b",3,0,1,0]'], "contents": []},
        {"headers": ['["first","a",1,"a","b",3,0,1,-1]'], "contents": [b""]},
        {"headers": ['["first","a",true,"a","b",3,0,1,0]'], "contents": [b""]},
        {"headers": ['["first","a",1e400,"a","b",3,0,1,0]'], "contents": [b""]},
        {"headers": ['["first","a",1,"a","b",3,-1,1,0]'], "contents": [b""]},
        {"headers": ['["first","a",1,"a","b",3,0,1]'], "contents": [b""]},
        {"headers": ["7"], "contents": [b""]},
        {"headers": [7], "contents": [b""]},
        {"headers": "[]", "contents": b""},
    ],
)
def test_invalid_chunks(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        unpack_chunks(Content(config))  # type: ignore[arg-type]
