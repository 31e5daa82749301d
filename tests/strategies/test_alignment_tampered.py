"""Relays that tamper with an alignment, parties that lie in it, and pinned keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from alignment_cases import (
    IDS,
    NAMES,
    check_rows,
    handshakes_of,
    make_app,
    make_parties,
    make_strategy,
    secrets_of,
)
from flwr.app import Message
from flwr.serverapp import Grid
from vertical_cases import HookedGrid, StatelessGrid

from flower_vfl import PartyError, in_process
from flower_vfl.alignment import AlignmentSettings, Identity
from flower_vfl.protocol.messages import Content, Verb, read


class TamperingGrid(HookedGrid):
    """A relay that changes what parties send, the first time that it can."""

    def __init__(self, inner: Grid, tamper: Callable[[Content, str], bool]) -> None:
        super().__init__(inner, self.change)
        self.tamper, self.done = tamper, 0

    def change(self, message: Message) -> None:
        if message.metadata.message_type != Verb.ALIGN or self.done:
            return
        content = read(message)
        if self.tamper(content, content.text("stage")):
            self.done += 1
            records = content.records()
            for key in list(message.content):
                message.content[key] = records[key]


def has_chunks(content: Content, stage: str, phase: str, least: int = 1) -> bool:
    if stage != "relay":
        return False
    found = [
        header for header in content.config["headers"] if json.loads(header)[0] == phase
    ]  # type: ignore[union-attr]
    return len(found) >= least


def on_chunks(
    phase: str,
    change: Callable[[list[str], list[bytes]], None],
    least: int = 1,
) -> Callable[[Content, str], bool]:
    """Return a function that changes the chunks of a request of some phase."""

    def tamper(content: Content, stage: str) -> bool:
        if not has_chunks(content, stage, phase, least):
            return False
        headers, contents = content.config["headers"], content.config["contents"]
        change(headers, contents)  # type: ignore[arg-type]
        return True

    return tamper


def flip(headers: list[str], contents: list[bytes]) -> None:
    contents[0] = bytes([contents[0][0] ^ 1]) + contents[0][1:]


def forge(headers: list[str], contents: list[bytes]) -> None:
    contents[0] = bytes(len(contents[0]))


def swap(headers: list[str], contents: list[bytes]) -> None:
    contents[0], contents[1] = contents[1], contents[0]


def reorder(headers: list[str], contents: list[bytes]) -> None:
    headers.reverse()
    contents.reverse()


def repeat(headers: list[str], contents: list[bytes]) -> None:
    headers.insert(0, headers[0])
    contents.insert(0, contents[0])


def leave_out(headers: list[str], contents: list[bytes]) -> None:
    del headers[0], contents[0]


def change_header(
    headers: list[str], contents: list[bytes], place: int, to: Any
) -> None:
    header = json.loads(headers[0])
    header[place] = to
    headers[0] = json.dumps(header)


TAMPERINGS = {
    "changed": (flip, "was changed"),
    "forged": (forge, "was changed"),
    "contents swapped": (swap, "was changed"),
    "re-ordered": (reorder, "out of order"),
    "replayed": (repeat, "replayed"),
    "left out": (leave_out, "out of order"),
    "another phase": (partial(change_header, place=0, to="universe"), "was changed"),
    "another owner": (partial(change_header, place=1, to="passive-2"), "was changed"),
    "another count": (partial(change_header, place=5, to=3), "was changed"),
    "another number": (partial(change_header, place=8, to=99), "out of order"),
    "for another": (partial(change_header, place=4, to="passive-2"), "not for"),
}


@pytest.mark.parametrize("phase", ["first", "blinded", "union", "universe"])
@pytest.mark.parametrize(
    ("attack", "stateless"),
    [
        *((attack, False) for attack in TAMPERINGS),
        ("changed", True),
        ("left out", True),
    ],
)
def test_a_relay_that_tampers_is_detected(
    attack: str, phase: str, stateless: bool
) -> None:
    change, problem = TAMPERINGS[attack]
    if phase == "universe" and attack == "another phase":
        change = partial(change_header, place=0, to="union")
    parties = make_parties(IDS[:2])
    inner: Any = in_process(parties)
    if stateless:
        inner = StatelessGrid(make_app(IDS[:2]), 2, {}, lambda count: count % 2)
    # at least three chunks in a message, so that some follow the one that is changed
    grid = TamperingGrid(inner, on_chunks(phase, change, least=3))
    with pytest.raises(PartyError, match=problem) as caught:
        make_strategy(relay_bytes=1200).connect(grid)
    assert grid.done == 1
    assert caught.value.party in NAMES[:2]
    assert phase in str(caught.value) or "lists" in str(caught.value)
    if stateless:
        assert not secrets_of(inner)
    else:
        assert not handshakes_of(inner)
        assert all(party.row_index is None for party in parties)


@pytest.mark.parametrize(
    ("phase", "problem"),
    [
        ("first", "out of order"),  # others follow from the same sender
        ("blinded", "out of order"),
        ("union", "list has not arrived"),  # nor has what follows from it
        ("universe", "universe list has not arrived at 'label'"),
    ],
)
def test_a_last_chunk_that_never_arrives_is_missed(phase: str, problem: str) -> None:
    """Where nothing follows that could show the gap, the end does."""

    def drop(content: Content, stage: str) -> bool:
        if not has_chunks(content, stage, phase):
            return False
        last = max(
            n
            for n, h in enumerate(content.config["headers"])  # type: ignore[arg-type]
            if json.loads(h)[0] == phase
        )
        for key in ("headers", "contents"):
            content.config[key] = content.config[key][:last]  # type: ignore[index]
        return True

    grid = TamperingGrid(in_process(make_parties(IDS[:2])), drop)
    with pytest.raises(PartyError, match=problem) as caught:
        make_strategy(relay_bytes=1 << 20).connect(grid)
    assert caught.value.party in NAMES[:2]
    assert not handshakes_of(grid.inner)  # type: ignore[arg-type]


def test_chunks_of_one_session_are_refused_in_the_next() -> None:
    """A relay that records the chunks of a run and replays them."""
    recorded: list[tuple[list[str], list[bytes]]] = []

    def keep(headers: list[str], contents: list[bytes]) -> None:
        recorded.append((list(headers), list(contents)))

    def play(headers: list[str], contents: list[bytes]) -> None:
        headers[:], contents[:] = recorded[0]

    parties = make_parties(IDS[:2])
    with in_process(parties) as inner:
        make_strategy().connect(TamperingGrid(inner, on_chunks("first", keep)))
        with pytest.raises(PartyError, match="was changed"):
            make_strategy().connect(TamperingGrid(inner, on_chunks("first", play)))


def replace_hellos(content: Content, stage: str) -> bool:
    if stage != "keys":
        return False
    mine = Identity()
    content.config["identities"] = [mine.public for _ in content.config["senders"]]  # type: ignore[union-attr]
    content.config["session-keys"] = [mine.public for _ in content.config["senders"]]  # type: ignore[union-attr]
    return True


def replace_fresh(content: Content, stage: str) -> bool:
    if stage != "keys":
        return False
    content.config["session-keys"] = [Identity().public] * 2
    return True


def pinned(names: Sequence[str], **wrong: bytes) -> dict[str, AlignmentSettings]:
    """Return settings of parties that have pinned each other's keys."""
    identities = {name: Identity() for name in names}
    pins = {name: each.public for name, each in identities.items()}
    return {
        name: AlignmentSettings(
            identities[name],
            {**pins, **wrong, name: pins[name]},
        )
        for name in names
    }


def test_pinned_parties_need_not_trust_the_server() -> None:
    parties = make_parties()
    with in_process(parties, pinned(NAMES)) as grid:
        make_strategy().connect(grid)
    check_rows(parties, "psu", 0)


def test_a_relay_that_replaces_the_hellos_is_detected_by_pins() -> None:
    with in_process(make_parties(IDS[:2]), pinned(NAMES[:2])) as inner:
        with pytest.raises(PartyError, match="key is not the pinned one"):
            make_strategy().connect(TamperingGrid(inner, replace_hellos))
        with pytest.raises(PartyError, match="was changed, or encrypted"):
            make_strategy().connect(TamperingGrid(inner, replace_fresh))
        assert not handshakes_of(inner)


def test_a_wrong_pin_names_the_party() -> None:
    wrong = {"passive-1": Identity().public}
    grid = in_process(make_parties(), pinned(NAMES, **wrong))
    with pytest.raises(PartyError, match="key is not the pinned") as caught:
        make_strategy().connect(grid)
    assert caught.value.party == "passive-1"


def test_a_party_that_sends_in_the_name_of_another_is_named() -> None:
    def lie(reply: Message) -> Message:
        content = read(reply)
        if reply.metadata.src_node_id == 2 and content.config.get("headers"):
            change_header(content.config["headers"], [], place=3, to="label")  # type: ignore[arg-type]
            reply.content.update(content.records())
        return reply

    grid = HookedGrid(in_process(make_parties()), after=lie)
    with pytest.raises(PartyError, match="a chunk from 'label' to") as caught:
        make_strategy().connect(grid)
    assert caught.value.party == "passive-1"


@pytest.mark.parametrize(("key", "value"), [("aligned", "x"), ("sizes", [1, 2, 3, 4])])
def test_a_party_with_another_outcome_is_named(key: str, value: object) -> None:
    def lie(reply: Message) -> Message:
        content = read(reply)
        if reply.metadata.src_node_id == 3 and "sizes" in content.config:
            content.config[key] = value  # type: ignore[assignment]
            reply.content.update(content.records())
        return reply

    inner = in_process(make_parties())
    with pytest.raises(PartyError, match="its outcome of the alignment") as caught:
        make_strategy().connect(HookedGrid(inner, after=lie))
    assert caught.value.party == "passive-2"
    assert not handshakes_of(inner)
