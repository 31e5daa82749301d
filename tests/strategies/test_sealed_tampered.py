"""Servers that tamper with a sealed run, and how the unsealed run takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flwr.app import Array, Message
from flwr.serverapp import Grid
from sealed_cases import (
    EPOCHS,
    NAMES,
    RecordingGrid,
    TamperingGrid,
    plain_array,
    sealed_app,
    sealed_grid,
    strategy,
)
from vertical_cases import StatelessGrid

from flower_vfl import ConfigError, NodePolicy, PartyError
from flower_vfl.alignment import Identity
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.protocol.messages import GRADIENT, Content, Verb, read, request
from flower_vfl.protocol.sealing import new_seals
from flower_vfl.strategies import Checkpoints

STEP = 4  # whose embeddings or gradients are tampered with
PASSIVE = NAMES[1:]
Arrays = dict[str, Array]  # of one step, by passive party
Attack = Callable[[Arrays, Arrays], Arrays]  # what was to be sent, the step before


def alter(arrays: Arrays, before: Arrays) -> Arrays:
    """Change one bit of the last float, or of the authentication tag."""
    data = bytearray(arrays["passive-1"].data)
    data[-4] ^= 1
    return {**arrays, "passive-1": plain_array(arrays["passive-1"], data)}


def drop(arrays: Arrays, before: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name != "passive-1"}


def repeat(arrays: Arrays, before: Arrays) -> Arrays:
    return {**arrays, "passive-1": before["passive-1"]}


def swap(arrays: Arrays, before: Arrays) -> Arrays:
    return {"passive-1": arrays["passive-2"], "passive-2": arrays["passive-1"]}


ATTACKS: dict[str, Attack] = {"alter": alter, "drop": drop, "repeat": repeat}
ATTACKS["swap"] = swap


class Server:
    """Tampers with the embeddings or the gradients of one step."""

    def __init__(self, kind: str, attack: Attack) -> None:
        self.kind, self.attack, self.before = kind, attack, Arrays()
        self.done = 0

    def __call__(self, asked: Sequence[tuple[Message, Content]]) -> None:
        wanted = Verb.TRAIN_STEP if self.kind == "embeddings" else Verb.FORWARD
        found = [c for m, c in asked if m.metadata.message_type == wanted]
        if not found:
            return
        if self.kind == "embeddings":
            [content] = found
            content.arrays = self.tampered(dict(content.arrays), content.step)
            return
        contents = dict(zip(PASSIVE, found, strict=True))
        if not contents["passive-1"].gradient_step:
            return
        gradients = {name: c.arrays[GRADIENT] for name, c in contents.items()}
        gradients = self.tampered(gradients, contents["passive-1"].gradient_step)
        for name, content in contents.items():
            content.arrays = {GRADIENT: gradients[name]} if name in gradients else {}

    def tampered(self, arrays: Arrays, step: int) -> Arrays:
        before, self.before = self.before, arrays
        if step != STEP:
            return arrays
        self.done += 1
        return self.attack(arrays, before)


def run(grid: Grid, tamper: Any, sealed: bool = True, **options: Any) -> None:
    # All batches of one size, so that what is repeated has the right shape.
    given = {"batch_size": 12, "evaluate_every": 0, "checkpoints": Checkpoints()}
    made = strategy(sealed, **{**given, **options})
    made.start(TamperingGrid(grid, tamper), num_rounds=EPOCHS)


@pytest.mark.parametrize("kind", ["embeddings", "gradients"])
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("stateless", [True, False])
def test_a_server_that_tampers_is_noticed(
    name: str, kind: str, stateless: bool
) -> None:
    server = Server(kind, ATTACKS[name])
    grid: Any = StatelessGrid(sealed_app(), 3, {}) if stateless else sealed_grid()
    with pytest.raises(PartyError) as caught:
        run(grid, server)
    assert server.done == 1
    error = caught.value
    assert error.step == STEP
    assert error.party == ("passive-1" if kind == "embeddings" else "label")
    if not (name == "drop" and kind == "embeddings"):
        assert "The server, or that party" in error.remedy


@pytest.mark.parametrize("kind", ["embeddings", "gradients"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_server_that_tampers_is_noticed_with_several_batches_under_way(
    name: str, kind: str
) -> None:
    """What is repeated answers an embedding that was answered before."""
    server = Server(kind, ATTACKS[name])
    with sealed_grid() as grid, pytest.raises(PartyError) as caught:
        run(grid, server, batch_size=4, pipeline=2)
    assert server.done == 1
    assert caught.value.step == STEP
    assert caught.value.party == ("passive-1" if kind == "embeddings" else "label")


def test_a_server_that_reorders_gradients_is_noticed() -> None:
    """The gradient of the next step arrives under the number of this one."""
    later: dict[int, Array] = {}

    def tamper(asked: Sequence[tuple[Message, Content]]) -> None:
        for message, content in asked:
            if message.metadata.dst_node_id == 2 and GRADIENT in content.arrays:
                later[content.gradient_step] = content.arrays[GRADIENT]
                if content.gradient_step == STEP:
                    content.arrays = {}
                if content.gradient_step == STEP + 1:
                    content.gradient_step = STEP

    with sealed_grid() as grid, pytest.raises(PartyError) as caught:
        run(grid, tamper, batch_size=4, pipeline=2)
    assert (caught.value.party, caught.value.step) == ("label", STEP)


@pytest.mark.parametrize("kind", ["embeddings", "gradients"])
@pytest.mark.parametrize("name", ATTACKS)
def test_the_unsealed_run_does_not_notice(name: str, kind: str) -> None:
    server = Server(kind, ATTACKS[name])
    with sealed_grid() as grid:
        if (name, kind) == ("drop", "embeddings"):  # the one thing that it misses
            with pytest.raises(PartyError, match="embedding is missing"):
                run(grid, server, sealed=False)
        else:
            run(grid, server, sealed=False)
    assert server.done == 1


def on_seal(change: Callable[[Content], None], receiver: int) -> Any:
    """Return a server that changes the public keys that one node gets."""

    def tamper(asked: Sequence[tuple[Message, Content]]) -> None:
        for message, content in asked:
            to = message.metadata.dst_node_id
            if message.metadata.message_type == Verb.SEAL and to == receiver:
                change(content)

    return tamper


def own_session_key(content: Content) -> None:
    keys = content.config["session-keys"]
    content.config["session-keys"] = [Identity().public, *keys[1:]]  # type: ignore[index]


def own_keys(content: Content) -> None:
    own_session_key(content)
    keys = content.config["identities"]
    content.config["identities"] = [Identity().public, *keys[1:]]  # type: ignore[index]


def left_out(content: Content) -> None:
    for key in ("senders", "identities", "session-keys"):
        content.config[key] = content.config[key][1:]  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "receiver", "party", "problem"),
    [
        (own_session_key, 1, "passive-1", "other keys"),
        (own_session_key, 2, "passive-1", "other keys"),
        (own_keys, 1, "passive-1", "not the pinned one"),
        (own_keys, 3, "label", "not the pinned one"),
        (left_out, 1, "label", "the public keys of passive-2"),
        (left_out, 2, "passive-1", "the public keys of nobody"),
    ],
)
def test_a_server_that_gives_its_own_keys_is_refused(
    change: Callable[[Content], None], receiver: int, party: str, problem: str
) -> None:
    with sealed_grid() as grid, pytest.raises(PartyError) as caught:
        run(grid, on_seal(change, receiver))
    assert caught.value.party == party and problem in str(caught.value)
    assert caught.value.step in (None, 1)


@pytest.mark.parametrize("sealed", [False, True])
def test_parties_that_are_told_different_settings_find_out(sealed: bool) -> None:
    def tamper(asked: Sequence[tuple[Message, Content]]) -> None:
        for message, content in asked:
            verb, node = message.metadata.message_type, message.metadata.dst_node_id
            if verb == Verb.CONFIGURE and node == 3:
                content.config["evaluation_rows"] = 1

    with sealed_grid() as grid:
        if not sealed:
            run(grid, tamper, sealed=False)
            return
        with pytest.raises(PartyError, match="other keys or settings") as caught:
            run(grid, tamper)
    assert (caught.value.party, caught.value.step) == ("passive-2", 1)


@pytest.mark.parametrize("sealed_for", ["", "label"])
def test_a_server_that_names_another_label_party(sealed_for: str) -> None:
    """That party has pinned keys too: it would read embeddings of the other."""
    hello: list[Content] = []

    def tamper(asked: Sequence[tuple[Message, Content]]) -> None:
        for message, content in asked:
            verb, node = message.metadata.message_type, message.metadata.dst_node_id
            if verb == Verb.CONFIGURE and node == 2:
                content.config["label"] = "passive-2"
            if verb == Verb.SEAL and node == 2:
                content.config = dict(hello[0].config)

    class Colluding(TamperingGrid):
        def send_and_receive(self, messages: Any, **given: Any) -> Any:
            replies = list(super().send_and_receive(messages, **given))
            hello[:] = [read(r) for r in replies if r.metadata.src_node_id == 3]
            return replies

    policy = NodePolicy(sealed_for=sealed_for)
    with sealed_grid(policy=policy) as grid, pytest.raises(PartyError) as caught:
        strategy().start(Colluding(grid, tamper), num_rounds=1)
    if sealed_for:
        assert caught.value.party == "passive-1" and "sealed-for" in str(caught.value)
    else:  # it sends its first embedding; only the real label party cannot read it
        assert "other keys or settings" in str(caught.value)
        assert caught.value.step == 1


def test_a_run_without_the_key_exchange_is_refused() -> None:
    class Skipping(TamperingGrid):
        def send_and_receive(self, messages: Any, **given: Any) -> Any:
            asked = list(messages)
            if asked[0].metadata.message_type != Verb.SEAL:
                return super().send_and_receive(asked, **given)
            return [Message(Content().records(), reply_to=each) for each in asked]

    with sealed_grid() as grid, pytest.raises(PartyError, match="shares no key"):
        strategy().start(Skipping(grid, lambda asked: None), num_rounds=1)


class Session:
    """Sends requests of its own to the parties of a sealed run, as a server can."""

    def __init__(self, grid: Grid) -> None:
        self.training = strategy(evaluate_every=0).connect(grid)
        self.messenger = self.training.messenger
        self.grid = grid

    def ask(self, verb: Verb, name: str, **fields: Any) -> Content:
        messenger = self.messenger
        messenger.turn += 1
        content = Content(**fields)
        message = request(verb, messenger.nodes[name], messenger.turn, content)
        reply = next(iter(self.grid.send_and_receive([message])))
        return read(reply)

    def forward(self, name: str, step: int = 1, **fields: Any) -> Content:
        index = step - 1
        return self.ask(Verb.FORWARD, name, step=step, epoch=1, index=index, **fields)

    def train(self, arrays: Arrays, step: int = 1) -> Content:
        fields = {"step": step, "epoch": 1, "index": step - 1}
        return self.ask(Verb.TRAIN_STEP, "label", arrays=arrays, **fields)


def embeddings(session: Session, step: int = 1) -> Arrays:
    replies = [session.forward(name, step) for name in PASSIVE]
    return {name: r.arrays[name] for name, r in zip(PASSIVE, replies, strict=True)}


def test_one_batch_is_embedded_once() -> None:
    with sealed_grid() as grid:
        session = Session(grid)
        session.forward("passive-1")
        assert "asked twice" in session.forward("passive-1").text("error")


def keep(session: Session, name: str) -> str:
    """Have a party keep its state; return the digest."""
    asked = {"tag": "step-0", "run": "1", "keep": ["step-0"]}
    return session.ask(Verb.CHECKPOINT, name, config=asked).text("digest")


def restore(session: Session, name: str, digest: str) -> None:
    """Bring a party back to what it kept."""
    asked = {"tags": ["step-0"], "digests": [digest], "run": "1"}
    assert "damaged" not in session.ask(Verb.RESTORE, name, config=asked).config


def test_what_was_recorded_before_a_restore_is_refused() -> None:
    """A server that brings parties back to a step cannot play the step again."""
    with sealed_grid() as grid:
        session = Session(grid)
        kept = {name: keep(session, name) for name in NAMES}
        first = embeddings(session)
        gradients = session.train(first).arrays
        for name in NAMES:
            restore(session, name, kept[name])
        assert "repeated" in session.train(first).text("error")
        second = embeddings(session)
        again = {GRADIENT: gradients["passive-1"]}
        reply = session.ask(Verb.BACKWARD, "passive-1", arrays=again, gradient_step=1)
        assert "repeated" in reply.text("error")
        assert set(session.train(second).arrays) == set(PASSIVE)


def test_a_party_that_alone_was_restored_is_refused() -> None:
    with sealed_grid() as grid:
        session = Session(grid)
        restore(session, "passive-1", keep(session, "passive-1"))
        reply = session.train(embeddings(session))
        assert reply.text("party") == "passive-1" and "repeated" in reply.text("error")


def test_what_is_not_encrypted_is_refused() -> None:
    with sealed_grid() as grid:
        recording = RecordingGrid(grid)
        strategy(sealed=False).start(recording, num_rounds=1)
        clear = {
            name: array
            for kind, content in recording.contents
            if kind == Verb.TRAIN_STEP and content.step == 1 and not content.metrics
            for name, array in content.arrays.items()
        }
        assert set(clear) == set(PASSIVE)
        session = Session(grid)
        assert "was not encrypted" in session.train(clear).text("error")


def test_encrypted_gradients_are_not_measured_for_the_server() -> None:
    with sealed_grid() as grid:
        session = Session(grid)
        gradients = session.train(embeddings(session)).arrays
        reply = session.ask(
            Verb.BACKWARD,
            "passive-1",
            config={"probe": "{}", "task": "binary"},
            arrays={GRADIENT: gradients["passive-1"]},
            gradient_step=1,
        )
        assert "the server must not see" in reply.text("error")


def test_keys_are_exchanged_once_and_only_in_a_sealed_run() -> None:
    with sealed_grid() as grid:
        session = Session(grid)
        keys = {"senders": [], "identities": [], "session-keys": []}
        reply = session.ask(Verb.SEAL, "label", config=dict(keys))
        assert "only once" in reply.text("remedy")
        strategy(sealed=False).connect(grid)
        session.messenger.turn += 100
        reply = session.ask(Verb.SEAL, "label", config=dict(keys))
        assert "not sealed" in reply.text("error")


@pytest.mark.parametrize(
    ("name", "role", "defended", "problem"),
    [
        ("passive-1", "passive", "strategy", "at the strategy"),
        ("passive-1", "label", "", "'label' is the label party"),
        ("label", "passive", "", "'label' is the label party"),
    ],
)
def test_a_configuration_that_cannot_be_sealed(
    name: str, role: Any, defended: str, problem: str
) -> None:
    config = TrainingConfig(seed=0, batch_size=4, defended=defended, sealed=True)
    with pytest.raises((PartyError, ConfigError), match=problem):
        new_seals(name, role, "label", config, "")
