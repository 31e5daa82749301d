"""The alignment handshake as Flower messages, over honest and dishonest grids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp import Grid
from torch import nn
from vertical_cases import StatelessGrid, WrappedGrid, assert_equal, losses

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    PartyError,
    PassiveParty,
    in_process,
    sessions,
    vertical_client_app,
)
from flower_vfl.alignment import AlignmentSettings, Identity
from flower_vfl.checkpoints import DirectoryStore
from flower_vfl.handshake import KeptAlignment
from flower_vfl.party import Party
from flower_vfl.protocol import Content, Verb, read
from flower_vfl.strategies import VerticalStrategy

IDS: list[list[object]] = [
    [f"person-{n}" for n in numbers]
    for numbers in (range(0, 30), range(12, 44), range(20, 50))
]
NAMES = ["label", "passive-1", "passive-2"]
TRUSTING = AlignmentSettings(trust_server=True)
COLUMNS, WIDTH = 4, 3


def make_parties(ids: Sequence[Sequence[object]] = IDS) -> list[Party]:
    """Return a label party and passive parties with ids that overlap in part."""
    torch.manual_seed(0)
    passive: list[Party] = [
        PassiveParty(
            torch.randn(len(own), COLUMNS),
            nn.Linear(COLUMNS, WIDTH),
            partial(torch.optim.SGD, lr=0.1),
            ids=own,
            device="cpu",
            secret=1,
        )
        for own in ids[1:]
    ]
    top = CrossEntropy(nn.Linear(WIDTH * len(passive), 1))
    labels = torch.arange(len(ids[0])) % 2
    label = LabelParty(labels, top, ids=ids[0], device="cpu", secret=1)
    return [label, *passive]


def make_app(
    ids: Sequence[Sequence[object]] = IDS,
    aligning: Callable[[Context], AlignmentSettings] = lambda context: TRUSTING,
) -> ClientApp:
    """Return an app that makes those parties at simulated nodes."""

    def party(context: Context) -> Any:
        return make_parties(ids)[int(context.node_config["partition-id"])]

    return vertical_client_app(party, party, aligning=aligning)


def make_strategy(method: str = "psu", **options: Any) -> VerticalStrategy:
    given = {"batch_size": 16, "seed": 3, "progress": False, "relay_bytes": 400}
    return VerticalStrategy(alignment=method, **{**given, **options})


def ids_by_row(party: Party) -> dict[int, object]:
    """Return the id that a party has for each aligned row that it holds."""
    assert party.holding is not None
    local = party.holding.local.tolist()
    return {row: party.ids[own] for row, own in enumerate(local) if own >= 0}  # type: ignore[index]


def check_rows(parties: Sequence[Party], method: str, padding: int) -> None:
    """Compare the aligned rows with the sets that Python makes of the ids."""
    ids = [set(party.ids) for party in parties]  # type: ignore[arg-type]
    expected = set.union(*ids) if method == "psu" else set.intersection(*ids)
    merged: dict[int, object] = {}
    for party, own in zip(parties, ids, strict=True):
        held = ids_by_row(party)
        assert set(held.values()) == own & expected
        for row, one in held.items():
            assert merged.setdefault(row, one) == one  # equal ids meet, and no others
    assert len(set(merged.values())) == len(merged) == len(expected)
    dummies = {party.rows - len(expected) for party in parties}
    assert len(dummies) == 1
    most = 2 * padding if method == "psu" else 0
    assert (padding if method == "psu" else 0) <= dummies.pop() <= most


@pytest.mark.parametrize("method", ["psu", "psi"])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("relay_bytes", [1, 1000])
def test_equal_ids_meet_on_one_row(
    method: str, number: int, padding: int, relay_bytes: int
) -> None:
    parties = make_parties(IDS[:number])
    strategy = make_strategy(method, padding=padding, relay_bytes=relay_bytes)
    with in_process(parties) as grid:
        training = strategy.connect(grid)
    check_rows(parties, method, padding)
    assert training.meeting.label.rows == parties[0].rows
    assert sum(training.meeting.sizes.values()) == parties[0].rows


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
    "choose",
    [
        pytest.param(lambda count: -1, id="a new process per message"),
        pytest.param(lambda count: count % 2, id="two processes in turn"),
        pytest.param(lambda count: hash((count, 1)) % 3, id="three at random"),
    ],
)
@pytest.mark.parametrize("method", ["psu", "psi"])
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
    result = strategy.start(
        WrappedGrid(grid, after=lose_every_third_once), num_rounds=2
    )
    assert set(losses(result)) == {1, 2}
    assert len(lost) > 10
    kept = [alignment_of(grid, node) for node in grid.contexts]
    assert len({each.fingerprint for each in kept}) == 1
    parties = make_parties()
    for party, each in zip(parties, kept, strict=True):
        party.place(sessions.Holding.from_alignment(each.alignment))
    check_rows(parties, method, 2)
    assert not secrets_of(grid)


def state_of(grid: StatelessGrid, node: int) -> Any:
    kind = type(context_to_proto(Context(0, 0, {}, sessions.RecordDict(), {})))
    return context_from_proto(kind.FromString(grid.contexts[node])).state


def alignment_of(grid: StatelessGrid, node: int) -> KeptAlignment:
    kept = KeptAlignment.load(
        sessions.open_store(Context(0, node, {}, state_of(grid, node), {}), "party")
    )
    assert kept is not None
    return kept


def secrets_of(grid: StatelessGrid) -> list[int]:
    """Return the nodes in whose state or memory a handshake is left."""
    left = [n for n in grid.contexts if "flower_vfl.handshake" in state_of(grid, n)]
    live = [s for process in grid.processes.values() for s in process.values()]
    return left + [0 for s in live if s.handshake or s.saved_handshake]


def test_a_handshake_survives_in_the_node_state_without_ids() -> None:
    seen: list[bytes] = []
    inner = StatelessGrid(make_app(), 3, {})

    def look(reply: Message) -> Message:
        for node in inner.contexts:
            record = state_of(inner, node).get("flower_vfl.handshake")
            if record is not None:
                seen.append(record["state"])
        return reply

    make_strategy().connect(WrappedGrid(inner, after=look))
    assert len(seen) > 20
    assert not any(b"person-" in state for state in seen)


def aligning_requests(grid: Grid, **options: Any) -> list[dict[str, Any]]:
    """Return what the strategy sends and receives while ids are aligned."""
    found: list[dict[str, Any]] = []

    def note(message: Message) -> Message:
        if message.metadata.message_type == Verb.ALIGN:
            found.append(dict(read(message).config))
        return message

    make_strategy(**options).connect(WrappedGrid(grid, note, note))
    return found


@pytest.mark.parametrize("relay_bytes", [100, 1000])
def test_messages_are_bounded(relay_bytes: int) -> None:
    with in_process(make_parties()) as grid:
        found = aligning_requests(grid, relay_bytes=relay_bytes)
    sizes = [sum(map(len, each.get("contents", []))) for each in found]
    largest = max(sizes)
    assert relay_bytes / 2 < largest <= relay_bytes
    assert sum(sizes) > 10 * relay_bytes


def test_all_parties_with_mail_are_asked_at_once() -> None:
    calls: list[int] = []

    class Counting(WrappedGrid):
        def send_and_receive(
            self, messages: Any, *, timeout: float | None = None
        ) -> Any:
            messages = list(messages)
            if messages[0].metadata.message_type == Verb.ALIGN:
                calls.append(len(messages))
            return self.inner.send_and_receive(messages, timeout=timeout)

    with in_process(make_parties()) as grid:
        make_strategy(relay_bytes=1 << 20).connect(Counting(grid))
    # begin, meet, 2n exchanges less those the merging party is alone in, finish, place
    assert calls == [3, 3, 3, 3, 3, 1, 1, 2, 3, 3]


def test_the_powers_that_are_announced_are_those_that_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flower_vfl.strategies import aligning

    bars = []

    class Noting(aligning.AlignmentProgress):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            bars.append(self)

        def done(self, party: str, powers: int, merged: int | None) -> None:
            super().done(party, powers, merged)
            self.last = sum(self._done.values()), self.total(merged)
            assert self.last[0] <= self.last[1]

    monkeypatch.setattr(aligning, "AlignmentProgress", Noting)
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
            digests.append(read(reply).config["ids-digest"])
        return reply

    with in_process(make_parties()) as grid:
        make_strategy().connect(WrappedGrid(grid, after=look))
    assert digests == ["", "", ""]


# --- a relay that meddles ----------------------------------------------------------


class Meddler(WrappedGrid):
    """A relay that changes what parties send, the first time that it can."""

    def __init__(self, inner: Grid, meddle: Callable[[Content, str], bool]) -> None:
        super().__init__(inner, self.change)
        self.meddle, self.done = meddle, 0

    def change(self, message: Message) -> None:
        if message.metadata.message_type != Verb.ALIGN or self.done:
            return
        content = read(message)
        if self.meddle(content, content.text("stage")):
            self.done += 1
            records = content.records()
            for key in list(message.content):
                message.content[key] = records[key]


def parts_of(content: Content, stage: str, phase: str, least: int = 1) -> bool:
    if stage != "relay":
        return False
    found = [head for head in content.config["heads"] if json.loads(head)[0] == phase]  # type: ignore[union-attr]
    return len(found) >= least


def on_parts(
    phase: str,
    change: Callable[[list[str], list[bytes]], None],
    least: int = 1,
) -> Callable[[Content, str], bool]:
    """Return a meddler that changes heads and contents of a request of some phase."""

    def meddle(content: Content, stage: str) -> bool:
        if not parts_of(content, stage, phase, least):
            return False
        heads, contents = content.config["heads"], content.config["contents"]
        change(heads, contents)  # type: ignore[arg-type]
        return True

    return meddle


def flip(heads: list[str], contents: list[bytes]) -> None:
    contents[0] = bytes([contents[0][0] ^ 1]) + contents[0][1:]


def forge(heads: list[str], contents: list[bytes]) -> None:
    contents[0] = bytes(len(contents[0]))


def swap(heads: list[str], contents: list[bytes]) -> None:
    contents[0], contents[1] = contents[1], contents[0]


def reorder(heads: list[str], contents: list[bytes]) -> None:
    heads.reverse()
    contents.reverse()


def repeat(heads: list[str], contents: list[bytes]) -> None:
    heads.insert(0, heads[0])
    contents.insert(0, contents[0])


def leave_out(heads: list[str], contents: list[bytes]) -> None:
    del heads[0], contents[0]


def change_head(heads: list[str], contents: list[bytes], place: int, to: Any) -> None:
    head = json.loads(heads[0])
    head[place] = to
    heads[0] = json.dumps(head)


MEDDLERS = {
    "changed": (flip, "was changed"),
    "forged": (forge, "was changed"),
    "contents swapped": (swap, "was changed"),
    "re-ordered": (reorder, "out of order"),
    "replayed": (repeat, "replayed"),
    "left out": (leave_out, "out of order"),
    "another phase": (partial(change_head, place=0, to="universe"), "was changed"),
    "another owner": (partial(change_head, place=1, to="passive-2"), "was changed"),
    "another count": (partial(change_head, place=5, to=3), "was changed"),
    "another number": (partial(change_head, place=8, to=99), "out of order"),
    "for another": (partial(change_head, place=4, to="passive-2"), "not for"),
}


@pytest.mark.parametrize("phase", ["first", "blinded", "union", "universe"])
@pytest.mark.parametrize(
    ("attack", "stateless"),
    [*((attack, False) for attack in MEDDLERS), ("changed", True), ("left out", True)],
)
def test_a_relay_that_meddles_is_found_out(
    attack: str, phase: str, stateless: bool
) -> None:
    change, problem = MEDDLERS[attack]
    if phase == "universe" and attack == "another phase":
        change = partial(change_head, place=0, to="union")
    parties = make_parties(IDS[:2])
    inner: Any = in_process(parties)
    if stateless:
        inner = StatelessGrid(make_app(IDS[:2]), 2, {}, lambda count: count % 2)
    # at least three parts in a message, so that some follow the one that is changed
    grid = Meddler(inner, on_parts(phase, change, least=3))
    with pytest.raises(PartyError, match=problem) as caught:
        make_strategy(relay_bytes=1200).connect(grid)
    assert grid.done == 1
    assert caught.value.party in NAMES[:2]
    assert phase in str(caught.value) or "lists" in str(caught.value)
    if stateless:
        assert not secrets_of(inner)
    else:
        assert not handshakes_of(inner)
        assert all(party.holding is None for party in parties)


def handshakes_of(grid: InProcessGrid) -> list[object]:
    """Return the handshakes that live behind a grid."""
    run = grid.run.run_id
    live = [s for key, s in sessions._sessions.items() if key[0] == run]
    assert live
    return [s.handshake for s in live if s.handshake or s.saved_handshake]


@pytest.mark.parametrize(
    ("phase", "problem"),
    [
        ("first", "out of order"),  # others follow from the same sender
        ("blinded", "out of order"),
        ("union", "list has not arrived"),  # nor has what follows from it
        ("universe", "universe list has not arrived at 'label'"),
    ],
)
def test_a_last_part_that_never_arrives_is_missed(phase: str, problem: str) -> None:
    """Where nothing follows that could show the gap, the end does."""

    def drop(content: Content, stage: str) -> bool:
        if not parts_of(content, stage, phase):
            return False
        last = max(
            n
            for n, h in enumerate(content.config["heads"])  # type: ignore[arg-type]
            if json.loads(h)[0] == phase
        )
        for key in ("heads", "contents"):
            content.config[key] = content.config[key][:last]  # type: ignore[index]
        return True

    grid = Meddler(in_process(make_parties(IDS[:2])), drop)
    with pytest.raises(PartyError, match=problem) as caught:
        make_strategy(relay_bytes=1 << 20).connect(grid)
    assert caught.value.party in NAMES[:2]
    assert not handshakes_of(grid.inner)  # type: ignore[arg-type]


def test_letters_of_one_session_are_refused_in_the_next() -> None:
    """A relay that keeps the letters of a run and plays them back."""
    recorded: list[tuple[list[str], list[bytes]]] = []

    def keep(heads: list[str], contents: list[bytes]) -> None:
        recorded.append((list(heads), list(contents)))

    def play(heads: list[str], contents: list[bytes]) -> None:
        heads[:], contents[:] = recorded[0]

    parties = make_parties(IDS[:2])
    with in_process(parties) as inner:
        make_strategy().connect(Meddler(inner, on_parts("first", keep)))
        with pytest.raises(PartyError, match="was changed"):
            make_strategy().connect(Meddler(inner, on_parts("first", play)))


def replace_hellos(content: Content, stage: str) -> bool:
    if stage != "meet":
        return False
    mine = Identity()
    content.config["identities"] = [mine.public for _ in content.config["senders"]]  # type: ignore[union-attr]
    content.config["fresh-keys"] = [mine.public for _ in content.config["senders"]]  # type: ignore[union-attr]
    return True


def replace_fresh(content: Content, stage: str) -> bool:
    if stage != "meet":
        return False
    content.config["fresh-keys"] = [Identity().public] * 2
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


def test_a_relay_that_replaces_the_hellos_meets_the_pins() -> None:
    with in_process(make_parties(IDS[:2]), pinned(NAMES[:2])) as inner:
        with pytest.raises(PartyError, match="another key than the pinned one"):
            make_strategy().connect(Meddler(inner, replace_hellos))
        with pytest.raises(PartyError, match="was changed, or sealed"):
            make_strategy().connect(Meddler(inner, replace_fresh))
        assert not handshakes_of(inner)


def test_a_wrong_pin_names_the_party() -> None:
    wrong = {"passive-1": Identity().public}
    grid = in_process(make_parties(), pinned(NAMES, **wrong))
    with pytest.raises(PartyError, match="another key than the pinned") as caught:
        make_strategy().connect(grid)
    assert caught.value.party == "passive-1"


def test_a_party_without_pins_and_trust_refuses() -> None:
    own = {**dict.fromkeys(NAMES, TRUSTING), "passive-2": AlignmentSettings()}
    with in_process(make_parties(), own) as grid:
        with pytest.raises(PartyError, match="pin them, or declare the") as caught:
            make_strategy().connect(grid)
        assert caught.value.party == "passive-2"
        assert not handshakes_of(grid)


def test_a_label_party_that_trusts_the_server_needs_no_pins() -> None:
    parties = make_parties(IDS[:2])
    assert isinstance(parties[0], LabelParty)
    parties[0].trust_server = True
    with in_process(parties, {"passive-1": TRUSTING}) as grid:
        make_strategy().connect(grid)
    check_rows(parties, "psu", 0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (AlignmentSettings(pins={"label": b"1" * 32}), "need a private key"),
        (
            AlignmentSettings(Identity(), {"label": b"1" * 32, "passive-1": b"2" * 32}),
            "is not its own key",
        ),
        (AlignmentSettings(Identity(), {}), "no public key of the party 'label'"),
        (replace(TRUSTING, methods=("psi",)), "does not take part in 'psu', only in"),
        (replace(TRUSTING, normalise="upper"), "unknown normaliser 'upper'"),
    ],
)
def test_settings_of_a_party_that_cannot_work(
    settings: AlignmentSettings, problem: str
) -> None:
    own = {"label": TRUSTING, "passive-1": settings}
    with in_process(make_parties(IDS[:2]), own) as grid:
        with pytest.raises(PartyError, match=problem) as caught:
            make_strategy().connect(grid)
        assert caught.value.party == "passive-1"
        assert not handshakes_of(grid)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (["a", "A", "b"], r"1 of 3 ids repeat an earlier one after normalisation"),
        ([1.5, 2.0, 3.5], "id at position 0: an id is a text.*not a float"),
        ([True, False, 7], "position 0.*not a bool"),
    ],
)
def test_ids_that_cannot_be_aligned(ids: list[object], problem: str) -> None:
    def lower(given: Any) -> Any:
        return given.lower() if isinstance(given, str) else given

    own = replace(TRUSTING, normalise=lower)
    grid = in_process(make_parties([IDS[0], ids]), own)
    with pytest.raises(PartyError, match=problem) as caught:
        make_strategy().connect(grid)
    assert caught.value.party == "passive-1"


def test_a_party_without_ids() -> None:
    parties = make_parties(IDS[:2])
    parties[1].ids = None
    grid = in_process(parties)
    with pytest.raises(PartyError, match="'passive-1': has no ids to align"):
        make_strategy().connect(grid)


def test_an_empty_intersection_is_an_error() -> None:
    with in_process(make_parties([[1, 2, 3], [4, 5]])) as grid:
        with pytest.raises(ConfigError, match="no id in common"):
            make_strategy("psi", padding=3).connect(grid)
        assert not handshakes_of(grid)


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


@pytest.mark.parametrize("stage", ["begin", "meet", "relay", "finish", "place"])
def test_a_party_that_vanishes_is_named_with_the_phase(stage: str) -> None:
    gone: list[int] = []

    def vanish(message: Message) -> None:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == Verb.ALIGN and node == 2:
            gone.extend([node] * (read(message).text("stage") == stage))

    def lose(reply: Message) -> Message | None:
        return None if reply.metadata.src_node_id in gone else reply

    with in_process(make_parties()) as inner:
        grid = WrappedGrid(inner, vanish, lose)
        with pytest.raises(PartyError, match="while ids were aligned") as caught:
            make_strategy().connect(grid, timeout=0.1)
        assert caught.value.party == "passive-1"
        assert "did not answer 2 requests" in str(caught.value)
        assert "nothing of it was kept" in str(caught.value)
        assert not handshakes_of(inner)


def test_a_party_that_writes_in_the_name_of_another_is_named() -> None:
    def lie(reply: Message) -> Message:
        content = read(reply)
        if reply.metadata.src_node_id == 2 and content.config.get("heads"):
            change_head(content.config["heads"], [], place=3, to="label")  # type: ignore[arg-type]
            reply.content.update(content.records())
        return reply

    grid = WrappedGrid(in_process(make_parties()), after=lie)
    with pytest.raises(PartyError, match="a letter from 'label' to") as caught:
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
    with pytest.raises(PartyError, match="has another outcome") as caught:
        make_strategy().connect(WrappedGrid(inner, after=lie))
    assert caught.value.party == "passive-2"
    assert not handshakes_of(inner)


# --- going on with an alignment ----------------------------------------------------


def start(folder: Path, stages: list[str] | None = None, **options: Any) -> Any:
    """Run in new parties with checkpoints in a folder; return result and parties."""
    given = {"checkpoint_every": 2, "state_dir": folder, "keep_final": True}
    rounds, resume = options.pop("rounds", 1), options.pop("resume", False)
    strategy = make_strategy(options.pop("method", "psu"), **{**given, **options})
    inner = InProcessGrid(make_app(), 3, {"state-dir": str(folder)})

    def note(message: Message) -> None:
        if stages is not None and message.metadata.message_type == Verb.ALIGN:
            stages.append(read(message).text("stage"))

    grid = WrappedGrid(inner, note)
    result = strategy.start(grid, num_rounds=rounds, resume=resume)
    return result, inner.parties()


def test_a_resumed_run_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    first, before = start(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    stages: list[str] = []
    second, after = start(tmp_path / "one", stages, rounds=3, resume=True)
    assert stages == ["place"] * 3  # no new handshake
    for name, party in before.items():
        assert torch.equal(party.holding.local, after[name].holding.local)
    assert losses(second)[1] == losses(first)[1]
    third, _ = start(tmp_path / "two", rounds=3, resume=True)
    assert losses(third) == losses(second)
    finals = [
        {n: DirectoryStore(tmp_path / f / n).load("final") for n in NAMES}
        for f in ("one", "two")
    ]
    assert_equal(*finals)


def test_a_new_start_aligns_anew(tmp_path: Path) -> None:
    _, before = start(tmp_path)
    _, after = start(tmp_path)
    assert any(
        not torch.equal(before[name].holding.local, after[name].holding.local)
        for name in NAMES
    )


def test_resuming_without_a_common_alignment_is_an_error(tmp_path: Path) -> None:
    start(tmp_path / "one")
    start(tmp_path / "two")
    file = tmp_path / "one" / "passive-2" / "alignment.pt"
    file.unlink()
    with pytest.raises(PartyError, match="'passive-2': has kept no alignment"):
        start(tmp_path / "one", resume=True)
    shutil.copy(tmp_path / "two" / "passive-2" / "alignment.pt", file)
    with pytest.raises(PartyError, match="'passive-2': has kept another alignment"):
        start(tmp_path / "one", resume=True)


def test_resuming_with_another_method_is_an_error(tmp_path: Path) -> None:
    start(tmp_path)
    for changed in ({"method": "psi"}, {"padding": 1}, {"group": "modp2048"}):
        with pytest.raises(PartyError, match="made with another method, group"):
            start(tmp_path, resume=True, **changed)


def test_a_checkpoint_of_another_alignment_is_refused(tmp_path: Path) -> None:
    """A newer run has aligned anew and ended before its first checkpoint."""
    start(tmp_path)
    start(tmp_path, checkpoint_every=0, keep_final=False)
    with pytest.raises(PartyError, match=r"was made with.*alignment"):
        start(tmp_path, resume=True)


def test_a_party_that_lost_its_memory_comes_back_to_its_rows(tmp_path: Path) -> None:
    strategy = make_strategy(checkpoint_every=1)
    inner = InProcessGrid(make_app(), 3, {"state-dir": str(tmp_path)})
    stages: list[str] = []
    steps = {"forward": 0}

    def forget_once(message: Message) -> None:
        kind = message.metadata.message_type
        if kind == Verb.ALIGN:
            stages.append(read(message).text("stage"))
        steps["forward"] += kind == Verb.FORWARD
        if steps["forward"] == 4 and message.metadata.dst_node_id == 3:
            steps["forward"] += 1
            sessions._sessions.pop((inner.run.run_id, 3))

    result = strategy.start(WrappedGrid(inner, forget_once), num_rounds=2)
    assert set(losses(result)) == {1, 2}
    assert stages.count("begin") == 3
    assert stages.count("place") == 6  # once after the handshake, once when it was back


@pytest.mark.parametrize("choose", [lambda count: -1, lambda count: count % 2])
def test_a_second_start_on_the_same_nodes(choose: Callable[[int], int]) -> None:
    grid = StatelessGrid(make_app(), 3, {}, choose)
    make_strategy(relay_bytes=4000).start(grid, num_rounds=1)
    one = [alignment_of(grid, node).fingerprint for node in grid.contexts]
    result = make_strategy(relay_bytes=4000).start(grid, num_rounds=1)
    two = [alignment_of(grid, node).fingerprint for node in grid.contexts]
    assert len({*one}) == len({*two}) == 1
    assert one != two
    assert set(losses(result)) == {1}
    assert not secrets_of(grid)
