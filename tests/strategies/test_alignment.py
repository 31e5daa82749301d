"""The alignment handshake as Flower messages, over honest grids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from alignment_cases import (
    IDS,
    TRUSTING,
    alignment_of,
    check_rows,
    ids_by_row,
    make_app,
    make_parties,
    make_strategy,
    secrets_of,
    state_of,
)
from covering import covering
from flwr.app import Message
from flwr.serverapp import Grid
from vertical_cases import HookedGrid, StatelessGrid, losses

from flower_vfl import LabelParty, in_process
from flower_vfl.parties.imputation import RowIndex
from flower_vfl.protocol.messages import Verb, read


@pytest.mark.parametrize(
    ("method", "number", "padding", "relay_bytes"),
    covering(["psu", "psi"], [2, 3], [0, 6], [1, 1000]),
)
def test_equal_ids_meet_on_one_row(
    method: str, number: int, padding: int, relay_bytes: int
) -> None:
    parties = make_parties(IDS[:number])
    strategy = make_strategy(method, padding=padding, relay_bytes=relay_bytes)
    with in_process(parties) as grid:
        training = strategy.connect(grid)
    check_rows(parties, method, padding)
    assert training.participants.label.rows == parties[0].rows
    assert sum(training.participants.sizes.values()) == parties[0].rows


@pytest.mark.parametrize("group", ["modp2048", "modp3072"])
def test_other_groups(group: str) -> None:
    parties = make_parties([[1, 2, 3], [3, 4]])
    with in_process(parties) as grid:
        make_strategy("psu", group=group).connect(grid)
    check_rows(parties, "psu", 0)


def test_training_on_the_union_follows() -> None:
    with in_process(make_parties()) as grid:
        result = make_strategy().start(grid, num_rounds=2)
    assert set(losses(result)) == {1, 2}


@pytest.mark.parametrize(
    ("choose", "method"),
    [
        pytest.param(lambda count: -1, "psu", id="a new process per message"),
        pytest.param(lambda count: hash((count, 1)) % 3, "psi", id="three at random"),
    ],
)
def test_where_only_the_node_state_survives(
    choose: Callable[[int], int], method: str
) -> None:
    grid = StatelessGrid(make_app(), 3, {}, choose)
    lost: set[str] = set()

    def lose_every_third_once(reply: Message) -> Message | None:
        key = f"{reply.metadata.group_id}-{reply.metadata.src_node_id}"
        if grid.count % 3 or key in lost:
            return reply
        lost.add(key)
        return None

    strategy = make_strategy(method, padding=2)
    result = strategy.start(HookedGrid(grid, after=lose_every_third_once), num_rounds=1)
    assert set(losses(result)) == {1}
    assert len(lost) > 10
    kept = [alignment_of(grid, node) for node in grid.contexts]
    assert len({each.fingerprint for each in kept}) == 1
    parties = make_parties()
    for party, each in zip(parties, kept, strict=True):
        party.place(RowIndex.from_aligned_ids(each.aligned))
    check_rows(parties, method, 2)
    assert not secrets_of(grid)


def test_a_handshake_survives_in_the_node_state_without_ids() -> None:
    seen: list[bytes] = []
    inner = StatelessGrid(make_app(), 3, {})

    def look(reply: Message) -> Message:
        for node in inner.contexts:
            record = state_of(inner, node).get("flower_vfl.alignment.handshake")
            if record is not None:
                seen.append(record["state"])
        return reply

    make_strategy().connect(HookedGrid(inner, after=look))
    assert len(seen) > 20
    assert not any(b"person-" in state for state in seen)


def aligning_requests(grid: Grid, **options: Any) -> list[dict[str, Any]]:
    """Return what the strategy sends and receives while ids are aligned."""
    found: list[dict[str, Any]] = []

    def note(message: Message) -> Message:
        if message.metadata.message_type == Verb.ALIGN:
            found.append(dict(read(message).config))
        return message

    make_strategy(**options).connect(HookedGrid(grid, note, note))
    return found


@pytest.mark.parametrize("relay_bytes", [100, 1000])
def test_messages_are_bounded(relay_bytes: int) -> None:
    with in_process(make_parties()) as grid:
        found = aligning_requests(grid, relay_bytes=relay_bytes)
    sizes = [sum(map(len, each.get("contents", []))) for each in found]
    largest = max(sizes)
    assert relay_bytes / 2 < largest <= relay_bytes
    assert sum(sizes) > 10 * relay_bytes


def test_all_parties_with_queued_chunks_are_asked_at_once() -> None:
    calls: list[int] = []

    class Counting(HookedGrid):
        def send_and_receive(
            self, messages: Any, *, timeout: float | None = None
        ) -> Any:
            messages = list(messages)
            if messages[0].metadata.message_type == Verb.ALIGN:
                calls.append(len(messages))
            return self.inner.send_and_receive(messages, timeout=timeout)

    with in_process(make_parties()) as grid:
        make_strategy(relay_bytes=1 << 20).connect(Counting(grid))
    # begin, keys, 2n exchanges less those the merging party is alone in, finish, apply
    assert calls == [3, 3, 3, 3, 3, 1, 1, 2, 3, 3]


def test_the_announced_exponentiations_are_those_that_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flower_vfl.strategies import alignment as alignment

    bars = []

    class Noting(alignment.AlignmentProgress):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            bars.append(self)

        def done(self, party: str, exponentiations: int, merged: int | None) -> None:
            super().done(party, exponentiations, merged)
            self.last = sum(self._done.values()), self.total(merged)
            assert self.last[0] <= self.last[1]

    monkeypatch.setattr(alignment, "AlignmentProgress", Noting)
    for method in ("psu", "psi"):
        with in_process(make_parties()) as grid:
            make_strategy(method, padding=3).connect(grid)
    assert len(bars) == 2
    for bar in bars:
        done, total = bar.last
        assert done == total > 0


def test_the_hello_sends_no_digest_of_ids_that_are_to_be_aligned() -> None:
    digests = []

    def look(reply: Message) -> Message:
        if reply.metadata.message_type == Verb.HELLO:
            digests.append(read(reply).config["ids_digest"])
        return reply

    with in_process(make_parties()) as grid:
        make_strategy().connect(HookedGrid(grid, after=look))
    assert digests == ["", "", ""]


def test_a_label_party_that_trusts_the_server_needs_no_pins() -> None:
    parties = make_parties(IDS[:2])
    assert isinstance(parties[0], LabelParty)
    parties[0].trust_server = True
    with in_process(parties, {"passive-1": TRUSTING}) as grid:
        make_strategy().connect(grid)
    check_rows(parties, "psu", 0)


def test_normalised_ids_meet() -> None:
    spelled = [["A@x.org", "b@x.org "], ["a@X.ORG", "c@x.org"]]
    parties = make_parties(spelled)
    own = replace(TRUSTING, normalise="lower_email")
    with in_process(parties, own) as grid:
        make_strategy().connect(grid)
    assert parties[0].rows == 3
    held = [ids_by_row(party) for party in parties]
    shared = set(held[0]) & set(held[1])
    assert [(held[0][row], held[1][row]) for row in shared] == [("A@x.org", "a@X.ORG")]
