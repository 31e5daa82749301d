from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rings import make_members

from flower_vfl.alignment import (
    ChunkCodec,
    Header,
    Hello,
    Identity,
    Member,
    Sealed,
    SealError,
    SecureChannel,
    make_group,
    settings,
)
from flower_vfl.alignment.ring import REMEDY
from flower_vfl.errors import ConfigError, PartyError

NAMES = ["a", "b", "c"]
AGREED = settings("psu", "ristretto255", NAMES, 0)
HEADER = Header("first", "a", 1, "a", "b", 3)


def make_seals(
    names: list[str] = NAMES, session: bytes = b"session", **changes: Any
) -> dict[str, SecureChannel]:
    """Return seals of parties that have pinned each other and have met."""
    identities = {name: Identity() for name in names}
    seals = {
        name: SecureChannel(
            name,
            session,
            changes.get(name, AGREED),
            identities[name],
            {n: each.public for n, each in identities.items() if n != name},
        )
        for name in names
    }
    hellos = [each.hello() for each in seals.values()]
    for each in seals.values():
        each.meet(hellos)
    return seals


def test_a_letter_arrives() -> None:
    seals = make_seals()
    for content in (b"", b"x", b"elements" * 1000):
        sealed = seals["a"].seal(HEADER, content)
        assert content == b"" or content not in sealed.content
        assert len(sealed.content) == len(content) + 16
        assert seals["b"].open(sealed) == content


def test_directions_and_pairs_have_keys_of_their_own() -> None:
    seals = make_seals()
    back = Header("first", "a", 1, "b", "a", 3)
    aside = replace(HEADER, receiver="c")
    sealed = [
        seals["a"].seal(HEADER, b"same"),
        seals["b"].seal(back, b"same"),
        seals["a"].seal(aside, b"same"),
    ]
    assert len({each.content[:4] for each in sealed}) == 3
    again = seals["a"].seal(HEADER, b"same")
    assert again.content[:4] != sealed[0].content[:4]


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "union"},
        {"owner": "c"},
        {"hop": 2},
        {"count": 4},
        {"part": 1},
        {"parts": 2},
        {"phase": "firsta", "owner": ""},
        {"sender": "c"},
    ],
)
def test_the_header_is_sealed(changes: dict[str, Any]) -> None:
    seals = make_seals()
    sealed = seals["a"].seal(HEADER, b"content")
    forged = replace(sealed, header=replace(HEADER, **changes))
    with pytest.raises(SealError, match="changed") as caught:
        seals["b"].open(forged)
    assert caught.value.party == changes.get("sender", "a")
    with pytest.raises(SealError):  # the session has ended
        seals["b"].open(sealed)


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_changed_content_is_refused(place: int) -> None:
    seals = make_seals()
    sealed = seals["a"].seal(HEADER, b"content")
    content = bytearray(sealed.content)
    content[place] ^= 1
    with pytest.raises(SealError, match="party 'a': letter 0 was changed"):
        seals["b"].open(replace(sealed, content=bytes(content)))


def test_replayed_swapped_and_missing_letters_are_refused() -> None:
    for order, problem in [([0, 0], "replayed"), ([1], "order"), ([0, 2], "order")]:
        seals = make_seals()
        letters = [seals["a"].seal(HEADER, b"%d" % n) for n in range(3)]
        with pytest.raises(SealError, match=problem):
            for number in order:
                seals["b"].open(letters[number])
    # a number that was changed to look right
    seals = make_seals()
    letters = [seals["a"].seal(HEADER, b"%d" % n) for n in range(2)]
    with pytest.raises(SealError, match="changed"):
        seals["b"].open(replace(letters[1], number=0))


def test_letters_for_others_and_own_letters_are_refused() -> None:
    for name in ("a", "c"):
        seals = make_seals()
        sealed = seals["a"].seal(HEADER, b"content")
        with pytest.raises(SealError, match="not for"):
            seals[name].open(sealed)
    seals = make_seals()
    sealed = seals["a"].seal(HEADER, b"content")
    mirrored = replace(sealed, header=replace(HEADER, sender="b", receiver="a"))
    with pytest.raises(SealError, match="changed"):
        seals["a"].open(mirrored)


def test_another_session_or_other_settings_do_not_open() -> None:
    one, two = make_seals(), make_seals(session=b"next")
    with pytest.raises(SealError, match="changed"):
        two["b"].open(one["a"].seal(HEADER, b"content"))
    other = settings("psu", "ristretto255", ["a", "c", "b"], 0)
    seals = make_seals(a=other)
    with pytest.raises(SealError, match="other settings"):
        seals["b"].open(seals["a"].seal(HEADER, b"content"))


def test_the_same_session_twice_has_other_keys() -> None:
    """A relay that repeats a session's name cannot replay that session's letters."""
    identities = {name: Identity() for name in "ab"}
    runs = []
    for _ in range(2):
        seals = {
            name: SecureChannel(
                name,
                b"session",
                AGREED,
                identities[name],
                {other: identities[other].public},
            )
            for name, other in (("a", "b"), ("b", "a"))
        }
        hellos = [each.hello() for each in seals.values()]
        for each in seals.values():
            each.meet(hellos)
        runs.append((seals, hellos))
    old = runs[0][0]["a"].seal(HEADER, b"content")
    with pytest.raises(SealError, match="changed"):
        runs[1][0]["b"].open(old)
    # nor by an old hello: the receiver's own key of this session is new
    fresh = SecureChannel(
        "b", b"session", AGREED, identities["b"], {"a": identities["a"].public}
    )
    fresh.meet([runs[0][1][0]])
    with pytest.raises(SealError, match="changed"):
        fresh.open(old)


def test_a_relay_that_replaces_keys_is_found_out() -> None:
    def with_relay(pinned: bool) -> tuple[SecureChannel, SecureChannel]:
        identities = {name: Identity() for name in "ab"}
        pins = {name: {} for name in "ab"}
        pins["a"]["b"], pins["b"]["a"] = identities["b"].public, identities["a"].public
        return tuple(
            SecureChannel(
                name,
                b"s",
                AGREED,
                identities[name],
                pins[name] if pinned else None,
                trust_server=not pinned,
            )
            for name in "ab"
        )  # type: ignore[return-value]

    a, b = with_relay(pinned=True)
    false = SecureChannel("a", b"s", AGREED, trust_server=True)
    with pytest.raises(SealError, match="party 'a': has another key than the pinned"):
        b.meet([false.hello()])
    # the pinned identity with a session key of the relay: it cannot seal
    a, b = with_relay(pinned=True)
    relay_key = SecureChannel("a", b"s", AGREED, trust_server=True)
    b.meet([Hello("a", a.hello().identity, relay_key.hello().fresh)])
    relay_key.meet([b_hello(b)])
    with pytest.raises(SealError, match="changed"):
        b.open(relay_key.seal(HEADER, b"dictionary"))
    # without pins the relay succeeds: hence only with a trusted server
    a, b = with_relay(pinned=False)
    relay_key = SecureChannel("a", b"s", AGREED, trust_server=True)
    hello = b.hello()
    b.meet([relay_key.hello()])
    relay_key.meet([hello])
    assert b.open(relay_key.seal(HEADER, b"dictionary")) == b"dictionary"


def b_hello(seals: SecureChannel) -> Hello:
    """Return some hello of b after it has met; only the relay's side needs it."""
    return Hello(seals.name, Identity().public, Identity().public)


def test_what_pins_need() -> None:
    identity = Identity()
    with pytest.raises(ConfigError, match="declare the server trusted"):
        SecureChannel("a", b"s", AGREED, identity)
    with pytest.raises(ConfigError, match="private key of this party"):
        SecureChannel("a", b"s", AGREED, None, {"b": identity.public})
    other = SecureChannel("b", b"s", AGREED, trust_server=True)
    with pytest.raises(ConfigError, match="'b' is pinned"):
        SecureChannel("a", b"s", AGREED, identity, {"c": identity.public}).meet(
            [other.hello()]
        )
    with pytest.raises(ConfigError, match="take no part: b"):
        SecureChannel("a", b"s", AGREED, identity, {"b": identity.public}).meet([])
    with pytest.raises(ConfigError, match="32 bytes"):
        Identity(b"short")
    assert Identity(identity.private_bytes()).public == identity.public


@pytest.mark.parametrize("bad", [bytes(32), b"\x01" + bytes(31), b"short"])
def test_keys_of_small_order_are_refused(bad: bytes) -> None:
    for changes in ({"fresh": bad}, {"identity": bad}):
        other = SecureChannel("b", b"s", AGREED, trust_server=True)
        seals = SecureChannel("a", b"s", AGREED, trust_server=True)
        with pytest.raises(SealError, match="a key that is none"):
            seals.meet([replace(other.hello(), **changes)])


def test_hellos_are_taken_once_and_not_reflected() -> None:
    seals = SecureChannel("a", b"s", AGREED, trust_server=True)
    with pytest.raises(SealError, match="own key"):
        seals.meet([replace(seals.hello(), sender="b")])
    other = SecureChannel("b", b"s", AGREED, trust_server=True).hello()
    seals = SecureChannel("a", b"s", AGREED, trust_server=True)
    with pytest.raises(SealError, match="second hello"):
        seals.meet([other, other])
    seals = SecureChannel("a", b"s", AGREED, trust_server=True)
    seals.meet([other])
    with pytest.raises(ConfigError, match="agreed on already"):
        seals.meet([replace(other, sender="c")])
    with pytest.raises(ConfigError, match="cannot seal"):
        seals.seal(replace(HEADER, sender="b", receiver="a"), b"")


# whole handshakes through a relay -----------------------------------------------------


def sealed_handshake(
    tamper: Callable[[list[Sealed]], list[Sealed]] = lambda parts: parts,
    part: int = 4,
) -> list[Member]:
    names = ["p0", "p1", "p2"]
    members = make_members([[*range(9)], [*range(5, 16)], []])
    seals = make_seals(names)
    group = make_group()
    posts = {name: ChunkCodec(seals[name], group, part) for name in names}
    by_name = {member.name: member for member in members}
    letters = [letter for member in members for letter in member.open()]
    while letters:
        parts = [p for letter in letters for p in posts[letter.sender].send(letter)]
        letters = []
        for sealed in tamper(parts):
            letter = posts[sealed.header.receiver].receive(sealed)
            if letter is not None:
                letters += by_name[letter.receiver].take(letter)
    for member in members:
        if member.alignment is None:
            raise PartyError(member.name, "has not finished", REMEDY)
    return members


@pytest.mark.parametrize("part", [1, 4, 1000])
def test_a_handshake_in_sealed_parts(part: int) -> None:
    sizes = []

    def watch(parts: list[Sealed]) -> list[Sealed]:
        sizes.extend(len(each.content) for each in parts)
        return parts

    members = sealed_handshake(watch, part)
    assert max(sizes) == 32 * min(part, 16) + 16
    for member in members:
        assert member.alignment is not None
        assert len(member.alignment.universe) == 16
    shared = [members[0].alignment.positions[5:], members[1].alignment.positions[:4]]
    assert list(shared[0]) == list(shared[1])


def drop(parts: list[Sealed]) -> list[Sealed]:
    return parts[1:]


def swap(parts: list[Sealed]) -> list[Sealed]:
    same = [p for p in parts if p.header.receiver == parts[0].header.receiver]
    same = [p for p in same if p.header.sender == parts[0].header.sender]
    if len(same) == 1:  # no two from the same sender: swap the contents
        one, two = parts[0], parts[1]
        swapped = [replace(one, content=two.content), replace(two, content=one.content)]
        return swapped + parts[2:]
    return same[::-1]


def replay(parts: list[Sealed]) -> list[Sealed]:
    return [parts[0], *parts]


def redirect(parts: list[Sealed]) -> list[Sealed]:
    header = parts[0].header
    other = next(
        n for n in ("p0", "p1", "p2") if n not in (header.sender, header.receiver)
    )
    return [replace(parts[0], header=replace(header, receiver=other)), *parts[1:]]


def relabel(parts: list[Sealed]) -> list[Sealed]:
    phase = "blinded" if parts[0].header.phase == "first" else "first"
    changed = replace(parts[0], header=replace(parts[0].header, phase=phase))
    return [changed, *parts[1:]]


def forge(parts: list[Sealed]) -> list[Sealed]:
    guesses = make_group().hash([b"guess"]).tobytes()
    return [replace(parts[0], content=guesses + bytes(16)), *parts[1:]]


@pytest.mark.parametrize("tamper", [drop, swap, replay, redirect, relabel, forge])
@pytest.mark.parametrize("exchange", [0, 2, 4])
def test_an_active_relay_is_detected(
    tamper: Callable[[list[Sealed]], list[Sealed]], exchange: int
) -> None:
    count = -1

    def once(parts: list[Sealed]) -> list[Sealed]:
        nonlocal count
        count += 1
        return tamper(parts) if count == exchange else parts

    with pytest.raises(PartyError, match="nothing of it was kept"):
        sealed_handshake(once)


def test_parts_of_two_letters_do_not_mix() -> None:
    seals, group = make_seals(), make_group()
    elements = group.hash([b"1", b"2", b"3"]).tobytes()
    cases = [
        [(replace(HEADER, parts=2), elements[:32]), (HEADER, elements)],
        [(replace(HEADER, parts=2, part=1), elements)],
        [(replace(HEADER, count=2), elements)],
        [(replace(HEADER, count=4), elements)],
        [(replace(HEADER, part=1), elements)],
    ]
    for case in cases:
        seals = make_seals()
        post = ChunkCodec(seals["b"], group)
        with pytest.raises(SealError):
            for header, content in case:
                post.receive(seals["a"].seal(header, content))
