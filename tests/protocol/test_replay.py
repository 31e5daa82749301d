"""A node that is asked message by message: repeated requests, requests out of place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor
from vertical_cases import ROWS, HookedGrid, assert_equal, rich_app, through_wire

from flower_vfl import InProcessGrid, PartyError, PartyRestartedError
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.protocol.messages import (
    GRADIENT,
    Content,
    TensorArray,
    Verb,
    raise_error,
    read,
    request,
)
from flower_vfl.protocol.residence import RESIDENT
from flower_vfl.strategies import VerticalStrategy

HELLO: dict[str, Any] = {
    "seed": 1,
    "defended": False,
    "repeatable": False,
    "threads": 0,
    "key": b"k" * 32,
}


class Node:
    """One node with a context, driven message by message."""

    def __init__(self, number: int = 1, resident: bool = False) -> None:
        self.grid = InProcessGrid(rich_app(), 3)
        self.node = number + 1
        self.context = self.grid._contexts[self.node]
        if not resident:
            del self.context.__dict__[RESIDENT]
            self.grid.close()
        self.party = lambda: next(iter(self.grid.parties().values()))

    def ask(self, verb: Verb, turn: int, content: Content | None = None) -> Content:
        message = request(verb, self.node, turn, content or Content())
        reply = self.grid._app(through_wire(message), self.context)
        return read(through_wire(reply))

    def begin(self) -> None:
        self.ask(Verb.HELLO, 1, Content(dict(HELLO)))
        shapes = {"passive-1": (3,), "passive-2": (3,)}
        config = TrainingConfig(1, 16, parties=shapes)
        self.ask(Verb.CONFIGURE, 2, Content(config.to_record()))


def assert_same_content(ours: Content, theirs: Content) -> None:
    assert ours.config == theirs.config
    assert ours.metrics == theirs.metrics
    assert_equal(ours.tensors(), theirs.tensors())


@pytest.mark.parametrize("resident", [True, False])
def test_a_repeated_request_is_answered_again_and_not_trained_twice(
    resident: bool,
) -> None:
    node = Node(1, resident)
    node.begin()
    where = {"epoch": 1, "index": 0, "step": 1}
    first = node.ask(Verb.FORWARD, 3, Content(**where))
    assert_same_content(node.ask(Verb.FORWARD, 3, Content(**where)), first)
    gradient = {GRADIENT: TensorArray(torch.ones(16, 3))}
    second = {"epoch": 1, "index": 1, "step": 2, "gradient_step": 1}
    reply = node.ask(Verb.FORWARD, 4, Content(arrays=gradient, **second))
    party = node.party()
    weights = [w.clone() for w in party.model.state_dict().values()]  # type: ignore[union-attr]
    random = party.random.state_dict()
    for _ in range(2):
        again = node.ask(Verb.FORWARD, 4, Content(arrays=gradient, **second))
        assert_same_content(again, reply)
    party = node.party()
    assert party.step == 1
    assert_equal(list(party.model.state_dict().values()), weights)  # type: ignore[union-attr]
    assert_equal(party.random.state_dict(), random)


@pytest.mark.parametrize("resident", [True, False])
def test_an_older_request_is_refused(resident: bool) -> None:
    node = Node(1, resident)
    node.begin()
    where = {"epoch": 1, "index": 0, "step": 1}
    node.ask(Verb.FORWARD, 7, Content(**where))
    for turn in (6, 2, 0):
        with pytest.raises(PartyError, match=f"request {turn} after request 7.*Two"):
            raise_error(node.ask(Verb.FORWARD, turn, Content(**where)), 1)
    gradient = {GRADIENT: TensorArray(torch.ones(16, 3))}
    late = Content(arrays=gradient, gradient_step=1)
    assert "error" not in node.ask(Verb.BACKWARD, 8, late).config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"step": 3, "epoch": 1, "index": 0}, "has trained 0 steps.*step 3"),
        ({"step": 1, "epoch": 1, "index": 99}, "batch 99 of epoch 1, which has"),
        ({"step": 1, "epoch": 1, "index": 0, "gradient_step": 1}, "expects no grad"),
    ],
)
def test_requests_out_of_place(config: dict[str, Any], words: str) -> None:
    node = Node()
    with pytest.raises(
        PartyRestartedError, match=r"before the hello.*start the run again"
    ):
        raise_error(node.ask(Verb.FORWARD, 1, Content(**config)), None)
    node.begin()
    with pytest.raises(PartyError, match=f"'passive-1'.*{words}"):
        raise_error(node.ask(Verb.FORWARD, 3, Content(**config)), None)
    with pytest.raises(PartyError, match="'passive-1' is not the label party"):
        raise_error(node.ask(Verb.TRAIN_STEP, 4, Content(**config)), None)


def test_a_gradient_of_another_step_or_shape_is_refused() -> None:
    node = Node()
    node.begin()
    node.ask(Verb.FORWARD, 3, Content(epoch=1, index=0, step=1))
    before = [w.clone() for w in node.party().model.state_dict().values()]  # type: ignore[union-attr]
    for turn, step, shape, words in (
        (4, 2, (16, 3), "step 2 but expects step 1"),
        (5, 1, (16, 2), r"shape \(16, 2\) for an embedding of shape \(16, 3\)"),
    ):
        arrays = {GRADIENT: TensorArray(torch.ones(*shape))}
        reply = node.ask(
            Verb.BACKWARD, turn, Content(arrays=arrays, gradient_step=step)
        )
        with pytest.raises(PartyError, match=words):
            raise_error(reply, None)
    good = {GRADIENT: TensorArray(torch.ones(16, 3))}
    nan = {GRADIENT: TensorArray(torch.full((16, 3), float("nan")))}
    reply = node.ask(Verb.BACKWARD, 6, Content(arrays=nan, gradient_step=1))
    with pytest.raises(PartyError, match=r"48 NaN.*learning rate"):
        raise_error(reply, None)
    after = list(node.party().model.parameters())  # type: ignore[union-attr]
    assert torch.equal(after[0], before[0])
    assert not node.ask(Verb.BACKWARD, 7, Content(arrays=good, gradient_step=1)).config
    assert node.party().step == 1


def test_a_repeated_hello_in_mid_run_changes_nothing() -> None:
    """A second server that looks around must not disturb the first."""

    def weights(disturb: bool) -> list[Tensor]:
        grid = InProcessGrid(rich_app(), 3)
        seen = {"label": 0}

        def hello(message: Message) -> None:
            seen["label"] += message.metadata.message_type == Verb.TRAIN_STEP.value
            if disturb and seen["label"] == 4:
                seen["label"] += 1
                for node in grid.get_node_ids():
                    spy = request(Verb.HELLO, node, 1, Content(dict(HELLO)))
                    (reply,) = grid.send_and_receive([spy])
                    assert read(reply).number("rows") == ROWS

        VerticalStrategy(batch_size=16).start(HookedGrid(grid, hello), num_rounds=2)
        return [
            w
            for party in grid.parties().values()
            for w in party.model.state_dict().values()  # type: ignore[union-attr]
        ]

    assert_equal(weights(True), weights(False))


def test_a_message_of_another_app_is_refused_politely() -> None:
    node = Node()
    foreign = Message(RecordDict({"c": ConfigRecord({"a": 1})}), 2, Verb.HELLO.value)
    reply = read(node.grid._app(through_wire(foreign), node.context))
    assert "not one of flower-vfl's" in reply.text("error")
    assert TaskIdentity.run_id  # set by the grid
