from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common import ConfigsRecord, MetricsRecord
from resident_cases import all_record_types

from flower_vfl.grids.resident.settings import CHUNK
from flower_vfl.grids.resident.wire import (
    Assembler,
    WireError,
    decode,
    encode,
    split_frame,
)


def travel(message: Message, wire_dtype: str | None = None) -> Message:
    return decode(b"".join(encode(message, wire_dtype)))


def test_a_message_arrives_as_it_left() -> None:
    message = Message(
        all_record_types(), 2**63 + 5, "train.some_step", ttl=7.5, group_id="g"
    )
    message.metadata.__dict__["_message_id"] = "an-id"
    got = travel(message)
    assert got.metadata == message.metadata
    assert got.content == message.content
    assert list(got.content) == list(message.content)
    assert not got.has_error()


def test_records_under_their_old_names_arrive() -> None:
    old = RecordDict({"c": ConfigsRecord({"n": 1}), "m": MetricsRecord({"n": 0.5})})
    got = travel(Message(old, 5, "train")).content
    assert (type(got["c"]), type(got["m"])) == (ConfigRecord, MetricRecord)
    assert got["c"] == {"n": 1} and got["m"] == {"n": 0.5}


def test_truth_values_among_numbers_are_numbers_as_with_flower() -> None:
    sent = RecordDict({"m": MetricRecord({"n": [2, True]})})
    [found] = travel(Message(sent, 5, "train")).content["m"].values()
    assert [(type(each), each) for each in found] == [(int, 2), (int, 1)]


@pytest.mark.parametrize("reason", ["why", None])
def test_an_error_arrives_as_it_left(reason: str | None) -> None:
    question = Message(RecordDict(), 5, "query")
    got = travel(Message(Error(2, reason), reply_to=question))
    assert got.error == Error(2, reason)
    assert not got.has_content()


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_half_precision_rounds_and_halves_the_size(dtype: str, bits: int) -> None:
    values = np.random.default_rng(0).normal(size=(300, 257)).astype(np.float32)
    values[0, :3] = np.inf, -np.inf, np.nan
    arrays = {"c": Array(values), "fortran": Array(np.asfortranarray(values))}
    content = RecordDict({"a": ArrayRecord(arrays)})
    message = Message(content, 5, "train")
    assert len(b"".join(encode(message, dtype))) < 0.55 * len(b"".join(encode(message)))
    got = travel(message, dtype).content.array_records["a"]
    rounded = got["c"].numpy()
    assert (got["c"].dtype, got["c"].stype) == ("float32", "numpy.ndarray")
    np.testing.assert_array_equal(got["fortran"].numpy(), rounded)
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(rounded, values, rtol=2.0**-bits, atol=1e-7)
    assert not np.array_equal(rounded, values, equal_nan=True)


def test_half_precision_leaves_other_arrays_unchanged() -> None:
    arrays = {
        "big": Array(np.array([1e30, 1.0], dtype=np.float32)),
        "double": Array(np.array([1 / 3])),
        "ints": Array(np.array([2**31 - 1], dtype=np.int32)),
        "foreign": Array("float32", (3,), "someone.else", b"whatever"),
    }
    content = RecordDict({"a": ArrayRecord(arrays)})
    assert travel(Message(content, 5, "train"), "float16").content == content


def test_half_precision_rounds_to_the_nearest_value_and_ties_to_even() -> None:
    every = np.arange(0, 2**32, 65_521, dtype=np.uint32)
    ties = np.arange(2**16, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate([every, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    # A float32 without its lower 16 bits is a bfloat16; NumPy has float16 itself.
    bits = values.view(np.uint32)
    even = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16 << 16).view(np.float32)
    largest = 3.3895313892515355e38
    fits = np.abs(values) <= largest
    small = np.abs(values) <= 65504.0
    for dtype, sent, wanted in (
        ("bfloat16", values[fits], even[fits]),
        ("float16", values[small], values[small].astype(np.float16)),
    ):
        content = RecordDict({"a": ArrayRecord({"x": Array(sent)})})
        got = travel(Message(content, 5, "train"), dtype).content["a"]["x"].numpy()
        np.testing.assert_array_equal(got, wanted.astype(np.float32))


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_are_joined(length: int) -> None:
    frame = (bytes(range(251)) * (length // 251 + 1))[:length]
    chunks = split_frame([frame[:5], frame[5:]])
    assert len(chunks) == max(1, math.ceil(length / CHUNK))
    assert max(map(len, chunks)) <= CHUNK + 1
    assembler = Assembler(length)
    for _ in range(2):
        *early, last = [assembler.feed(chunk) for chunk in chunks]
        assert early == [None] * len(early)
        assert last is not None and bytes(last) == frame


def test_frames_over_the_limit_are_refused() -> None:
    assembler = Assembler(2 * CHUNK)
    chunks = split_frame([bytes(3 * CHUNK)])
    assembler.feed(chunks[0])
    assembler.feed(chunks[1])
    with pytest.raises(WireError, match="over the limit"):
        assembler.feed(chunks[2])


@pytest.mark.parametrize("chunk", [b"", b"\x07abc", b"\x01", b"\x01short"])
def test_malformed_frames_are_refused(chunk: bytes) -> None:
    with pytest.raises(WireError, match="malformed"):
        Assembler(1000).feed(chunk)


def forged(
    records: Any = (), fields: dict[int, Any] | None = None, error: Any = None
) -> bytes:
    """Return a payload as a peer could write it that knows the format."""
    about = [1, "", 2, 3, "", "", 1.0, 60.0, "train", None, 7]
    for place, value in (fields or {}).items():
        about[place] = value
    header = msgpack.packb((about, records, error))
    return struct.pack("<I", len(header)) + header


HEAD = ["x", "uint8", [3], "bytes", 0, 0]


@pytest.mark.parametrize("mode", ["content", "error"])
def test_a_forged_message_without_a_fault_is_read(mode: str) -> None:
    config = ["c", "c", {"n": [1, 2], "b": b"x"}]
    if mode == "content":
        got = decode(forged([config, ["a", "a", []]]))
        assert got.content.config_records["c"] == config[2]
        assert got.metadata.src_task_id is None and got.metadata.dst_task_id == 7
    else:
        assert decode(forged(None, error=[2, ""])).error == Error(2, None)


@pytest.mark.parametrize(
    "payload",
    [
        *(
            forged([["k", "c", {"v": value}]])
            for value in (None, {"a": 1}, [[1]], [1, 1.0], [None])
        ),
        forged([["k", "c", {"v": msgpack.ExtType(5, b"x")}]]),
        forged([["k", "c", {"v": msgpack.Timestamp(1)}]]),
        forged([["k", "c", {b"v": 1}]]),
        forged([["k", "m", {"v": "text"}]]),
        forged([["k", "m", {"v": True}]]),
        forged([["k", "c", [1]]]),
        forged([["k", "q", {}]]),
        forged([[5, "c", {}]]),
        *(
            forged([["k", "a", [[*HEAD[:place], value, *HEAD[place + 1 :]]]]])
            for place, value in (
                (0, 1),
                (1, None),
                (2, [1.5]),
                (2, [True]),
                (2, 3),
                (3, 3),
                (4, 9),
                (4, -1),
                (5, -5),
                (5, 2**63),
            )
        ),
        *(
            forged(fields={place: value})
            for place, value in ((0, "1"), (0, True), (3, 1.0), (7, None), (8, 5))
        ),
        forged(fields={9: "task"}),
        forged(None),
        forged(None, error=["2", ""]),
        forged(None, error=[2, "", 3]),
        forged([["k", "c", {}]], error=[2, ""]),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


@pytest.mark.parametrize("cast", [-1, -2, 3])
def test_a_cast_that_does_not_exist_is_refused(cast: int) -> None:
    """Half of the bytes of three float32 numbers, as after a cast."""
    head = ["x", "float32", [3], "numpy.ndarray", cast, 6]
    payload = forged([["k", "a", [head]]])
    padding = -(25 + len(payload)) % 64  # a frame has 25 bytes before its payload
    with pytest.raises(WireError, match=f"unknown cast {cast}"):
        decode(payload + bytes(padding) + bytes(6))


def test_a_header_that_would_fill_the_memory_is_refused() -> None:
    length = (1 << 25) + 1
    with pytest.raises(WireError, match=r"over the limit.*as arrays"):
        decode(struct.pack("<I", length) + bytes(length))


def test_damaged_messages_are_refused() -> None:
    whole = b"".join(encode(Message(all_record_types(), 5, "train")))
    random = np.random.default_rng(1)
    for cut in range(0, len(whole), 7):
        with pytest.raises(WireError):
            decode(whole[:cut])
    with pytest.raises(WireError):
        decode(whole + b"x")
    for _ in range(300):
        damaged = bytearray(whole)
        for where in random.integers(0, len(whole), 4):
            damaged[where] = random.integers(256)
        # What still decodes is a message; nothing but WireError may come out.
        with suppress(WireError):
            assert isinstance(decode(bytes(damaged)), Message)
    pickled = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
    with pytest.raises(WireError):
        decode(pickled)
