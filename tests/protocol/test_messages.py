"""Messages: round trips, malformed records, and errors that travel."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from vertical_cases import assert_equal, rich_app, through_wire

from flower_vfl import ConfigError, InProcessGrid, PartyError, PartyRestartedError
from flower_vfl.protocol.config import PartyDescription, TrainingConfig
from flower_vfl.protocol.messages import (
    Content,
    TensorArray,
    Verb,
    error_content,
    raise_error,
    read,
    reply_to,
    request,
    to_tensor,
)
from flower_vfl.records import Measurement


@pytest.fixture
def grid() -> InProcessGrid:
    """Give Flower's messages the identity they need."""
    return InProcessGrid(rich_app(), 3)


def test_content_survives_the_wire(grid: InProcessGrid) -> None:
    content = Content(
        config={
            "text": "ä",
            "flag": True,
            "share": 0.1,
            "key": b"\x00\xff",
            "names": ["a", "b"],
            "sizes": [1, 2],
        },
        arrays={
            "a": TensorArray(torch.randn(2, 3)),
            "b": TensorArray(torch.zeros(0, 3)),
        },
        metrics={"loss": 0.1, "rows": 16.0},
        labels=TensorArray(torch.tensor([1.0, 0.0])),
        measured=[Measurement("leak", 0.7, 3, "a", "norm"), Measurement("x", 1.0)],
        step=9,
        epoch=3,
        index=2,
        gradient_step=8,
    )
    found = read(through_wire(request(Verb.TRAIN_STEP, 1, 77, content)))
    assert found.config == content.config
    assert (found.turn, found.step, found.epoch) == (77, 9, 3)
    assert (found.index, found.gradient_step) == (2, 8)
    assert found.measured == content.measured
    assert found.metrics == content.metrics
    assert list(found.arrays) == ["a", "b"]
    assert_equal(found.tensors(), content.tensors())
    assert found.labels is not None
    assert torch.equal(to_tensor(found.labels), torch.tensor([1.0, 0.0]))


def test_messages_are_as_flower_makes_them(grid: InProcessGrid) -> None:
    """They are made without Flower's checks; no field may be forgotten or wrong."""
    content = Content({"tag": "a"}, {"a": TensorArray(torch.ones(2))}, step=3)
    sent = request(Verb.FORWARD, 2, 7, content)
    theirs = Message(sent.content, 2, Verb.FORWARD.value, group_id="7")
    assert sent.metadata.delivered_at == ""
    arrived = through_wire(sent)
    arrived.metadata.delivered_at = "2026-11-17"  # as a SuperLink does
    answers = reply_to(arrived, sent.content), Message(sent.content, reply_to=arrived)
    for ours, flowers in ((sent, theirs), answers):
        found, expected = vars(ours.metadata), vars(flowers.metadata)
        assert found["_ttl"] == pytest.approx(expected.pop("_ttl"), abs=5.0)
        assert found["_created_at"] == pytest.approx(expected.pop("_created_at"), abs=5)
        assert {**found, **expected} == found and len(found) == len(expected) + 2
        assert vars(ours).keys() == vars(flowers).keys() and not ours.has_error()
    theirs = RecordDict({key: sent.content[key] for key in sent.content})
    assert vars(sent.content).keys() == vars(theirs).keys()
    for key, record in Content(arrays=content.arrays, step=3).records().items():
        assert vars(record).keys() == vars(type(record)()).keys(), key


@pytest.mark.parametrize(
    "content",
    [
        Content(),
        Content(step=1),
        Content(gradient_step=1),
        Content(arrays={"a": TensorArray(torch.ones(1))}),
        Content(metrics={"loss": 2.0}),
    ],
    ids=["nothing", "step", "gradient step", "arrays", "metrics"],
)
def test_parts_that_are_absent_stay_absent(
    content: Content, grid: InProcessGrid
) -> None:
    carrier = Message(RecordDict(), 1, Verb.TRAIN_STEP.value)
    reply = Message(content.records(), reply_to=through_wire(carrier))
    found = read(through_wire(reply))
    assert found.config == content.config
    assert list(found.arrays) == list(content.arrays)
    assert found.metrics == content.metrics
    assert (found.step, found.gradient_step) == (content.step, content.gradient_step)
    assert found.labels is None and not found.measured


FIVE = [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "records",
    [
        {"vfl": MetricRecord({"numbers": FIVE})},
        {"vfl": ConfigRecord({"numbers": 5})},
        {"vfl": ConfigRecord({"numbers": [0.0] * 5})},
        {"vfl": ConfigRecord({"numbers": FIVE[1:]})},
        {"vfl-arrays": ConfigRecord({"passive-1": 3})},
        {"vfl": ConfigRecord({"numbers": FIVE}), "vfl-metrics": ArrayRecord()},
        {"vfl": ConfigRecord({"numbers": FIVE}), "vfl-labels": ArrayRecord()},
        {"vfl": ConfigRecord({"numbers": FIVE}), "vfl-measured": ConfigRecord()},
        {
            "vfl": ConfigRecord({"numbers": FIVE}),
            "vfl-metrics": MetricRecord({"loss": [1.0, 2.0]}),
        },
    ],
)
def test_malformed_records_are_refused(
    records: dict[str, Any], grid: InProcessGrid
) -> None:
    with pytest.raises(ConfigError, match=r"message 'query\.x'"):
        read(Message(RecordDict(records), 1, "query.x"))


@pytest.mark.parametrize(
    ("dtype", "shape", "change"),
    [
        ("int32", (2, 3), ("<f4", "<f4")),  # another type than the bytes have
        ("float32", (3, 2), ("<f4", "<f4")),  # another shape
        ("float32", (2, 3), ("<f4", "<i4")),
        ("float32", (2, 3), ("<f4", ">f4")),
        ("float32", (2, 3), ("(2, 3), }", "(2, 3), ")),
        ("float32", (2, 3), ("(2, 3)", "(2, 9)")),
        ("float32", (2, 3), ("(2, 3), }         ", "(2, 399999999999)}")),
        ("nothing", (2, 3), ("<f4", "<f4")),
        ("int64", (2, 3), ("<f4", "<i8")),
    ],
)
def test_arrays_that_are_not_what_they_say(
    dtype: str, shape: tuple[int, ...], change: tuple[str, str]
) -> None:
    data = Array(np.ones((2, 3), np.float32)).data
    data = data.replace(*(text.encode() for text in change))
    content = Content(arrays={"bank": Array(dtype, shape, "numpy.ndarray", data)})
    assert content.size() >= 0
    with pytest.raises(PartyError, match="party 'bank'"):
        content.tensors()


def test_whole_numbers_are_no_embedding() -> None:
    whole = TensorArray(torch.ones(2, 3, dtype=torch.int64))
    content = Content(arrays={"bank": whole})
    with pytest.raises(PartyError, match=r"party 'bank': .*torch.int64 came"):
        content.tensors()


def test_entries_of_the_wrong_kind() -> None:
    content = Content(config={"flag": True, "text": "x", "share": 0.5, "n": 3})
    assert content.number("n") == 3
    assert content.text("text") == "x"
    for key in ("flag", "text", "share"):
        with pytest.raises(ConfigError, match=f"'{key}' must be a whole number"):
            content.number(key)
    with pytest.raises(ConfigError, match="'n' must be a text"):
        content.text("n")
    with pytest.raises(ConfigError, match="no 'step'"):
        content.number("step")


def test_configs_and_descriptions_round_trip(grid: InProcessGrid) -> None:
    config = TrainingConfig(
        5, 32, 100, 0.3, 0.1, {"b": (4,), "a": (2, 3, 3)}, "sum", 0.01
    )
    message = through_wire(request(Verb.CONFIGURE, 1, 1, Content(config.to_record())))
    found = TrainingConfig.from_record(read(message).config)
    assert found == config
    assert list(found.parties) == ["b", "a"]  # the order decides how they are joined
    for description in (
        PartyDescription("x", "label", 9, (), "binary", "d1", "d2"),
        PartyDescription("y", "passive", 0, (2, 5)),
    ):
        packed = Content(description.to_record())
        message = through_wire(request(Verb.HELLO, 1, 1, packed))
        assert PartyDescription.from_record(read(message).config) == description


@pytest.mark.parametrize(
    "change",
    [
        {"name": ["x"]},
        {"rows": "9"},
        {"rows": True},
        {"shape": "3x-1"},
        {"shape": "9" * 5000},
        {"role": "other"},
        {"role": "passive"},
        {"task": ""},
    ],
)
def test_descriptions_that_are_refused(change: dict[str, Any]) -> None:
    good = PartyDescription("x", "label", 9, (), "binary").to_record()
    assert PartyDescription.from_record(good).rows == 9
    with pytest.raises(ConfigError):
        PartyDescription.from_record({**good, **change})


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PartyError("a", "p", "r", 4), PartyError, "party 'a', step 4: p. r"),
        (PartyError("a", "p", "r"), PartyError, "party 'a', step 9: p. r"),
        (PartyError("a", "p", "r", 0), PartyError, "party 'a', step 0: p. r"),
        (PartyRestartedError("a", "p", "r"), PartyRestartedError, "'a', step 9"),
        (ConfigError("no such thing"), PartyError, "'b', step 9: no such thing. Cor"),
        (ZeroDivisionError("x"), PartyError, "unexpected ZeroDivisionError arose"),
    ],
)
def test_errors_survive_the_wire(
    error: Exception, kind: type[PartyError], text: str, grid: InProcessGrid
) -> None:
    message = through_wire(request(Verb.HELLO, 1, 1, error_content(error, "b")))
    with pytest.raises(kind) as caught:
        raise_error(read(message), 9)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (kind, str(caught.value))


def test_a_message_without_its_numbers_is_refused(grid: InProcessGrid) -> None:
    records = RecordDict({"vfl": ConfigRecord({"split": "test"})})
    message = Message(records, 2, Verb.EMBED.value)
    with pytest.raises(ConfigError, match=r"lacks its five numbers.*same version"):
        read(message)
