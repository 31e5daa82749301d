"""Lost, foreign and broken replies, and nodes and apps that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_cases import assert_words, fails_before_training, start
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from vertical_cases import HookedGrid, simple_parties

from flower_vfl import (
    InProcessGrid,
    PartyError,
    PassiveParty,
    in_process,
    vertical_client_app,
)
from flower_vfl.protocol import messages as protocol
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import VerticalStrategy


def test_rows_that_get_lost_on_the_way_are_noticed_by_the_label_party() -> None:
    label, passive = simple_parties()
    grid = in_process([label, *passive])

    def drop_row(reply: Message) -> Message:
        records = reply.content.array_records
        if reply.metadata.message_type == Verb.FORWARD and "passive-1" in str(records):
            record = next(iter(records.values()))
            array = protocol.to_tensor(record["passive-1"])
            record["passive-1"] = protocol.TensorArray(array[:-1])
        return reply

    with pytest.raises(PartyError) as caught:
        VerticalStrategy(batch_size=16).start(HookedGrid(grid, after=drop_row))
    assert (caught.value.party, caught.value.step) == ("passive-1", 1)
    assert_words(caught.value, "(15, 3)", "expected (16, 3)")


def run_with_losses(lost: Callable[[Message, int], bool], **options: Any) -> list[Any]:
    """Train; return weights and how often each request was sent."""
    label, passive = simple_parties()
    sent: dict[str, int] = {}

    def count(message: Message) -> None:
        key = f"{message.metadata.dst_node_id}-{message.metadata.group_id}"
        sent[key] = sent.get(key, 0) + 1

    def lose(reply: Message) -> Message | None:
        key = f"{reply.metadata.src_node_id}-{reply.metadata.group_id}"
        return None if lost(reply, sent[key]) else reply

    grid = HookedGrid(in_process([label, *passive]), count, lose)
    VerticalStrategy(batch_size=16, **options).start(grid, num_rounds=2, timeout=7)
    models = [label.objective, *(party.model for party in passive)]
    weights = [w for model in models for w in model.state_dict().values()]
    return [weights, max(sent.values())]


def test_a_party_that_vanishes() -> None:
    def lost(reply: Message, sent: int) -> bool:
        return reply.metadata.src_node_id == 3 and int(reply.metadata.group_id) > 6

    with pytest.raises(PartyError) as caught:
        run_with_losses(lost, retries=2)
    assert (caught.value.party, caught.value.step) == ("passive-2", 3)
    assert_words(caught.value, "3 requests within 7 s", "log", "start the run again")


def test_a_lost_reply_is_asked_for_again_and_trained_once() -> None:
    expected, once = run_with_losses(lambda reply, sent: False)
    assert once == 1

    def lost(reply: Message, sent: int) -> bool:
        return int(reply.metadata.group_id) % 2 == 0 and sent == 1

    found, twice = run_with_losses(lost)
    assert twice == 2
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ErrorCode.NODE_UNAVAILABLE, None),
        (ErrorCode.CLIENT_APP_CRASHED, None),
        (ErrorCode.INVALID_FAB, "its ClientApp failed: for a test"),
    ],
)
def test_what_flower_reports_about_a_message(code: int, words: str | None) -> None:
    label, passive = simple_parties()
    left = {"errors": 1}

    def fail_once(reply: Message) -> Message:
        if reply.metadata.src_node_id == 2 and left["errors"]:
            left["errors"] -= 1
            failed = Message(Error(code, "for a test"), reply_to=reply)
            failed.metadata.__dict__["_src_node_id"] = 2
            return failed
        return reply

    grid = HookedGrid(in_process([label, *passive]), after=fail_once)
    strategy = VerticalStrategy(batch_size=16)
    if words is None:
        strategy.start(grid, num_rounds=1)
        assert label.step == 3
    else:
        with pytest.raises(PartyError, match=words):
            strategy.start(grid, num_rounds=1)
    assert left["errors"] == 0


def test_a_client_app_that_raises() -> None:
    label, _ = simple_parties()

    def passive(context: Context) -> PassiveParty:
        raise FileNotFoundError("shop.csv")

    grid = InProcessGrid(vertical_client_app(passive, lambda context: label), 2)
    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(grid)
    assert caught.value.party == "passive-1"
    assert_words(caught.value, "FileNotFoundError", "test_errors_messages.py:", "log")
    assert "shop.csv" not in str(caught.value)

    broken = ClientApp()  # not one of ours: answers no query
    with pytest.raises(PartyError, match=r"'node-1'.*ClientApp failed.*log"):
        VerticalStrategy().start(InProcessGrid(broken, 2))


def test_a_reply_that_is_not_one_of_ours() -> None:
    app = ClientApp()

    @app.query("vfl_hello")
    def hello(message: Message, context: Context) -> Message:
        records = RecordDict({"metrics": MetricRecord({"loss": 1.0})})
        return Message(records, reply_to=message)

    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(InProcessGrid(app, 2))
    assert_words(caught.value, "'node-1'", "not one of flower-vfl's", "vertical_client")


def test_a_reply_without_its_embedding() -> None:
    label, passive = simple_parties()

    def rename_embedding(reply: Message) -> Message:
        of_second = reply.metadata.src_node_id == 3
        if of_second and reply.metadata.message_type == Verb.FORWARD:
            for record in reply.content.array_records.values():
                record["other"] = record.pop("passive-2")
        return reply

    grid = HookedGrid(in_process([label, *passive]), after=rename_embedding)
    with pytest.raises(PartyError, match=r"'passive-2', step 1.*no embedding.*version"):
        VerticalStrategy().start(grid)


def test_another_version_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    label, passive = simple_parties()
    future = protocol.VERSION + 1
    monkeypatch.setattr("flower_vfl.protocol.client_app.VERSION", future)
    fails_before_training(
        [label, *passive], "'label'", "version", "Install the same flower-vfl"
    )


def test_other_versions_of_packages_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = iter(["flwr 1", "flwr 1", "flwr 2"])
    monkeypatch.setattr("flower_vfl.protocol.client_app.versions", lambda: next(texts))
    label, passive = simple_parties()
    start([label, *passive], epochs=1)
    assert "passive-2: flwr 2" in caplog.text


def test_a_factory_that_returns_the_wrong_role() -> None:
    label, _ = simple_parties()
    app = vertical_client_app(lambda c: label, lambda c: label)  # type: ignore[arg-type,return-value]
    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(InProcessGrid(app, 2))
    assert_words(caught.value, "'passive-1'", "passive node returned a LabelParty")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["node 2 has no role", "--node-config", "role="]),
        ({"role": "boss"}, ["unknown role 'boss'", "known: label, passive"]),
    ],
)
def test_a_node_without_a_role(config: dict[str, str], words: list[str]) -> None:
    label, passive = simple_parties()
    app = vertical_client_app(lambda c: passive[0], lambda c: label)
    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(InProcessGrid(app, [{"role": "label"}, config]))
    assert_words(caught.value, "'node-2'", *words)
