from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rings import AGREED, CONFIG, HEADER, make_channels

from flower_vfl.alignment import Identity
from flower_vfl.alignment.channel import ChannelError, SecureChannel
from flower_vfl.alignment.messages import Header, Hello
from flower_vfl.errors import ConfigError


def test_a_chunk_arrives() -> None:
    channels = make_channels()
    for content in (b"", b"x", b"elements" * 1000):
        chunk = channels["a"].encrypt(HEADER, content)
        assert len(content) < 8 or content not in chunk.content  # one byte may be
        assert len(chunk.content) == len(content) + 16
        assert channels["b"].decrypt(chunk) == content


def test_directions_and_pairs_have_keys_of_their_own() -> None:
    channels = make_channels()
    back = Header("first", "a", 1, "b", "a", 3)
    aside = replace(HEADER, receiver="c")
    chunk = [
        channels["a"].encrypt(HEADER, b"same"),
        channels["b"].encrypt(back, b"same"),
        channels["a"].encrypt(aside, b"same"),
    ]
    assert len({each.content[:4] for each in chunk}) == 3
    again = channels["a"].encrypt(HEADER, b"same")
    assert again.content[:4] != chunk[0].content[:4]


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "union"},
        {"owner": "c"},
        {"hop": 2},
        {"count": 4},
        {"chunk": 1},
        {"chunks": 2},
        {"phase": "firsta", "owner": ""},
        {"sender": "c"},
    ],
)
def test_the_header_is_authenticated(changes: dict[str, Any]) -> None:
    channels = make_channels()
    chunk = channels["a"].encrypt(HEADER, b"content")
    forged = replace(chunk, header=replace(HEADER, **changes))
    with pytest.raises(ChannelError, match="changed") as caught:
        channels["b"].decrypt(forged)
    assert caught.value.party == changes.get("sender", "a")
    with pytest.raises(ChannelError):  # the session has ended
        channels["b"].decrypt(chunk)


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_changed_content_is_refused(place: int) -> None:
    channels = make_channels()
    chunk = channels["a"].encrypt(HEADER, b"content")
    content = bytearray(chunk.content)
    content[place] ^= 1
    with pytest.raises(ChannelError, match="party 'a': chunk 0 was changed"):
        channels["b"].decrypt(replace(chunk, content=bytes(content)))


def test_replayed_swapped_and_missing_chunks_are_refused() -> None:
    for order, problem in [([0, 0], "replayed"), ([1], "order"), ([0, 2], "order")]:
        channels = make_channels()
        chunks = [channels["a"].encrypt(HEADER, b"%d" % n) for n in range(3)]
        with pytest.raises(ChannelError, match=problem):
            for number in order:
                channels["b"].decrypt(chunks[number])
    # a number that was changed to look right
    channels = make_channels()
    chunks = [channels["a"].encrypt(HEADER, b"%d" % n) for n in range(2)]
    with pytest.raises(ChannelError, match="changed"):
        channels["b"].decrypt(replace(chunks[1], number=0))


def test_chunks_for_others_and_own_chunks_are_refused() -> None:
    for name in ("a", "c"):
        channels = make_channels()
        chunk = channels["a"].encrypt(HEADER, b"content")
        with pytest.raises(ChannelError, match="not for"):
            channels[name].decrypt(chunk)
    channels = make_channels()
    chunk = channels["a"].encrypt(HEADER, b"content")
    mirrored = replace(chunk, header=replace(HEADER, sender="b", receiver="a"))
    with pytest.raises(ChannelError, match="changed"):
        channels["a"].decrypt(mirrored)


def test_another_session_or_other_settings_do_not_open() -> None:
    one, two = make_channels(), make_channels(session=b"next")
    with pytest.raises(ChannelError, match="changed"):
        two["b"].decrypt(one["a"].encrypt(HEADER, b"content"))
    other = replace(CONFIG, ring=("a", "c", "b")).agreed()
    channels = make_channels(a=other)
    with pytest.raises(ChannelError, match="other settings"):
        channels["b"].decrypt(channels["a"].encrypt(HEADER, b"content"))


def test_the_same_session_twice_has_other_keys() -> None:
    """A relay that repeats a session's name cannot replay that session's chunks."""
    identities = {name: Identity() for name in "ab"}
    runs = []
    for _ in range(2):
        channels = {
            name: SecureChannel(
                name,
                b"session",
                AGREED,
                identities[name],
                {other: identities[other].public},
            )
            for name, other in (("a", "b"), ("b", "a"))
        }
        hellos = [each.hello() for each in channels.values()]
        for each in channels.values():
            each.exchange_keys(hellos)
        runs.append((channels, hellos))
    old = runs[0][0]["a"].encrypt(HEADER, b"content")
    with pytest.raises(ChannelError, match="changed"):
        runs[1][0]["b"].decrypt(old)
    # nor by an old hello: the receiver's own key of this session is new
    fresh = SecureChannel(
        "b", b"session", AGREED, identities["b"], {"a": identities["a"].public}
    )
    fresh.exchange_keys([runs[0][1][0]])
    with pytest.raises(ChannelError, match="changed"):
        fresh.decrypt(old)


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
    with pytest.raises(ChannelError, match="party 'a': its key is not the pinned"):
        b.exchange_keys([false.hello()])
    # the pinned identity with a session key of the relay: it cannot encrypt
    a, b = with_relay(pinned=True)
    relay_key = SecureChannel("a", b"s", AGREED, trust_server=True)
    b.exchange_keys([Hello("a", a.hello().identity, relay_key.hello().session_key)])
    relay_key.exchange_keys([b_hello(b)])
    with pytest.raises(ChannelError, match="changed"):
        b.decrypt(relay_key.encrypt(HEADER, b"dictionary"))
    # without pins the relay succeeds: hence only with a trusted server
    a, b = with_relay(pinned=False)
    relay_key = SecureChannel("a", b"s", AGREED, trust_server=True)
    hello = b.hello()
    b.exchange_keys([relay_key.hello()])
    relay_key.exchange_keys([hello])
    assert b.decrypt(relay_key.encrypt(HEADER, b"dictionary")) == b"dictionary"


def b_hello(channel: SecureChannel) -> Hello:
    """Return some hello of b after its key exchange; only the relay's side needs it."""
    return Hello(channel.name, Identity().public, Identity().public)


def test_what_pins_need() -> None:
    identity = Identity()
    with pytest.raises(ConfigError, match="declare the server trusted"):
        SecureChannel("a", b"s", AGREED, identity)
    with pytest.raises(ConfigError, match="private key of its own"):
        SecureChannel("a", b"s", AGREED, None, {"b": identity.public})
    other = SecureChannel("b", b"s", AGREED, trust_server=True)
    with pytest.raises(ConfigError, match="pinned for the party 'b'"):
        SecureChannel(
            "a", b"s", AGREED, identity, {"c": identity.public}
        ).exchange_keys([other.hello()])
    with pytest.raises(ConfigError, match="not taking part: b"):
        SecureChannel(
            "a", b"s", AGREED, identity, {"b": identity.public}
        ).exchange_keys([])
    with pytest.raises(ConfigError, match="32 bytes"):
        Identity(b"short")
    assert Identity(identity.private_bytes()).public == identity.public


@pytest.mark.parametrize("bad", [bytes(32), b"\x01" + bytes(31), b"short"])
def test_keys_of_small_order_are_refused(bad: bytes) -> None:
    for changes in ({"session_key": bad}, {"identity": bad}):
        other = SecureChannel("b", b"s", AGREED, trust_server=True)
        channel = SecureChannel("a", b"s", AGREED, trust_server=True)
        with pytest.raises(ChannelError, match="an invalid key"):
            channel.exchange_keys([replace(other.hello(), **changes)])


def test_hellos_are_taken_once_and_not_reflected() -> None:
    channel = SecureChannel("a", b"s", AGREED, trust_server=True)
    with pytest.raises(ChannelError, match="own key"):
        channel.exchange_keys([replace(channel.hello(), sender="b")])
    other = SecureChannel("b", b"s", AGREED, trust_server=True).hello()
    channel = SecureChannel("a", b"s", AGREED, trust_server=True)
    with pytest.raises(ChannelError, match="second hello"):
        channel.exchange_keys([other, other])
    channel = SecureChannel("a", b"s", AGREED, trust_server=True)
    channel.exchange_keys([other])
    with pytest.raises(ConfigError, match="derived already"):
        channel.exchange_keys([replace(other, sender="c")])
    with pytest.raises(ConfigError, match="cannot encrypt"):
        channel.encrypt(replace(HEADER, sender="b", receiver="a"), b"")
