"""Lists in encrypted chunks, through relays that are honest or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rings import HEADER, make_channels, make_members

from flower_vfl.alignment.channel import ChannelError, ChunkCodec
from flower_vfl.alignment.groups import make_group
from flower_vfl.alignment.handshake import Member
from flower_vfl.alignment.messages import REMEDY, EncryptedChunk
from flower_vfl.errors import PartyError

Chunks = list[EncryptedChunk]
Tamper = Callable[[Chunks], Chunks]


def encrypted_handshake(
    tamper: Tamper = lambda chunks: chunks, rows: int = 4
) -> list[Member]:
    """Return the members of a handshake whose chunks pass through a relay."""
    names = ["p0", "p1", "p2"]
    members = make_members([[*range(9)], [*range(5, 16)], []])
    channels, group = make_channels(names), make_group()
    codecs = {name: ChunkCodec(channels[name], group, rows) for name in names}
    by_name = {member.name: member for member in members}
    messages = [message for member in members for message in member.start()]
    while messages:
        chunks = []
        for message in messages:
            codec = codecs[message.header.sender]
            chunks += [codec.encode(message, n) for n in range(codec.chunks(message))]
        messages = []
        for chunk in tamper(chunks):
            receiver = chunk.header.receiver
            message = codecs[receiver].decode(chunk)
            if message is not None:
                messages += by_name[receiver].receive(message)
    for member in members:
        if member.aligned is None:
            raise PartyError(member.name, "has not finished", REMEDY)
    return members


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_a_handshake_in_encrypted_chunks(rows: int) -> None:
    sizes = []

    def watch(chunks: Chunks) -> Chunks:
        sizes.extend(len(each.content) for each in chunks)
        return chunks

    members = encrypted_handshake(watch, rows)
    assert max(sizes) == 32 * min(rows, 16) + 16
    for member in members:
        assert member.aligned is not None
        assert len(member.aligned.universe) == 16
    shared = [members[0].aligned.positions[5:], members[1].aligned.positions[:4]]
    assert list(shared[0]) == list(shared[1])


def drop(chunks: Chunks) -> Chunks:
    return chunks[1:]


def swap(chunks: Chunks) -> Chunks:
    same = [p for p in chunks if p.header.receiver == chunks[0].header.receiver]
    same = [p for p in same if p.header.sender == chunks[0].header.sender]
    if len(same) == 1:  # no two from the same sender: swap the contents
        one, two = chunks[0], chunks[1]
        swapped = [replace(one, content=two.content), replace(two, content=one.content)]
        return swapped + chunks[2:]
    return same[::-1]


def replay(chunks: Chunks) -> Chunks:
    return [chunks[0], *chunks]


def redirect(chunks: Chunks) -> Chunks:
    header = chunks[0].header
    other = next(
        n for n in ("p0", "p1", "p2") if n not in (header.sender, header.receiver)
    )
    return [replace(chunks[0], header=replace(header, receiver=other)), *chunks[1:]]


def relabel(chunks: Chunks) -> Chunks:
    phase = "blinded" if chunks[0].header.phase == "first" else "first"
    changed = replace(chunks[0], header=replace(chunks[0].header, phase=phase))
    return [changed, *chunks[1:]]


def forge(chunks: Chunks) -> Chunks:
    guesses = make_group().hash([b"guess"]).tobytes()
    return [replace(chunks[0], content=guesses + bytes(16)), *chunks[1:]]


@pytest.mark.parametrize("tamper", [drop, swap, replay, redirect, relabel, forge])
@pytest.mark.parametrize("exchange", [0, 2, 4])
def test_an_active_relay_is_detected(tamper: Tamper, exchange: int) -> None:
    count = -1

    def once(chunks: Chunks) -> Chunks:
        nonlocal count
        count += 1
        return tamper(chunks) if count == exchange else chunks

    with pytest.raises(PartyError, match="nothing of it was kept"):
        encrypted_handshake(once)


def test_chunks_of_two_lists_do_not_mix() -> None:
    group = make_group()
    elements = group.hash([b"1", b"2", b"3"]).tobytes()
    cases = [
        [(replace(HEADER, chunks=2), elements[:32]), (HEADER, elements)],
        [(replace(HEADER, chunks=2, chunk=1), elements)],
        [(replace(HEADER, count=2), elements)],
        [(replace(HEADER, count=4), elements)],
        [(replace(HEADER, chunk=1), elements)],
        [(replace(HEADER, chunks=0), elements)],
    ]
    for case in cases:
        channels = make_channels()
        codec = ChunkCodec(channels["b"], group, 1000)
        with pytest.raises(ChannelError):
            for header, content in case:
                codec.decode(channels["a"].encrypt(header, content))
