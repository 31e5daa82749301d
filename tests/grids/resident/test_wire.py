from __future__ import annotations

import math
import sys
from contextlib import suppress

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from resident_cases import everything, raw

from flower_vfl.grids.resident import half_precision as half
from flower_vfl.grids.resident.settings import CHUNK
from flower_vfl.grids.resident.wire import Assembler, WireError, chunks, decode, encode


def travel(message: Message, wire_dtype: str | None = None) -> Message:
    return decode(b"".join(encode(message, wire_dtype)))


def test_a_message_arrives_as_it_left() -> None:
    message = Message(everything(), 2**63 + 5, "train.some_step", ttl=7.5, group_id="g")
    message.metadata.__dict__["_message_id"] = "an-id"
    got = travel(message)
    assert got.metadata == message.metadata
    assert got.content == message.content
    assert list(got.content) == list(message.content)
    assert not got.has_error()


@pytest.mark.parametrize("reason", ["why", None])
def test_an_error_arrives_as_it_left(reason: str | None) -> None:
    question = Message(RecordDict(), 5, "query")
    got = travel(Message(Error(2, reason), reply_to=question))
    assert got.error == Error(2, reason)
    assert not got.has_content()


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize(
    ("dtype", "bits"), [("float16", 11), ("bfloat16", 8)], ids=["float16", "bfloat16"]
)
def test_half_precision_keeps_what_it_can(
    dtype: str, bits: int, with_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_torch:
        pytest.importorskip("torch")
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    values = np.random.default_rng(0).normal(size=(300, 257)).astype(np.float32)
    values[0, :3] = np.inf, -np.inf, np.nan
    content = RecordDict(
        {
            "a": ArrayRecord(
                {"raw": raw(values), "numpy": Array(np.asfortranarray(values))}
            )
        }
    )
    message = Message(content, 5, "train")
    assert len(b"".join(encode(message, dtype))) < 0.55 * len(b"".join(encode(message)))
    got = travel(message, dtype).content.array_records["a"]
    numpy = got["numpy"].numpy()
    assert (got["raw"].dtype, got["raw"].stype) == ("float32", "flower_vfl.raw")
    plain = np.frombuffer(got["raw"].data, "<f4").reshape(got["raw"].shape)
    np.testing.assert_array_equal(plain, numpy)
    assert numpy.dtype == np.float32
    np.testing.assert_allclose(numpy, values, rtol=2.0**-bits, atol=1e-7)
    assert not np.array_equal(numpy, values, equal_nan=True)


def test_half_precision_leaves_alone_what_it_would_break() -> None:
    big = raw(np.array([1e30, 1.0]))
    arrays = {
        "big": big,
        "double": Array(np.array([1 / 3])),
        "ints": Array(np.array([2**31 - 1], dtype=np.int32)),
        "foreign": Array("float32", (3,), "someone.else", b"whatever"),
        "wrong length": Array("float32", (3,), "flower_vfl.raw", b"1234"),
    }
    content = RecordDict({"a": ArrayRecord(arrays)})
    assert travel(Message(content, 5, "train"), "float16").content == content


def test_torch_and_numpy_shrink_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    every = np.arange(0, 2**32, 65_521, dtype=np.uint32).view(np.float32)
    every = every[np.isfinite(every)]
    ties = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    ties = ties[np.isfinite(ties)]
    for dtype in ("float16", "bfloat16"):
        for values in (every, ties):
            values = values[np.abs(values) <= half.LARGEST[dtype]]
            fast = half.shrink(values, dtype)
            with monkeypatch.context() as without:
                without.delitem(sys.modules, "torch")
                assert half.shrink(values, dtype) == fast
                slow = half.widen(memoryview(fast), dtype)
            np.testing.assert_array_equal(half.widen(memoryview(fast), dtype), slow)


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_frames_come_back_together(length: int) -> None:
    frame = bytes(i % 251 for i in range(length))
    pieces = chunks([frame[:5], frame[5:]])
    assert len(pieces) == max(1, math.ceil(length / CHUNK))
    assert max(map(len, pieces)) <= CHUNK + 1
    assembler = Assembler(length)
    for _ in range(2):
        *early, last = [assembler.feed(piece) for piece in pieces]
        assert early == [None] * len(early)
        assert last is not None and bytes(last) == frame


def test_frames_over_the_limit_are_not_collected() -> None:
    assembler = Assembler(2 * CHUNK)
    pieces = chunks([bytes(3 * CHUNK)])
    assembler.feed(pieces[0])
    assembler.feed(pieces[1])
    with pytest.raises(WireError, match="over the limit"):
        assembler.feed(pieces[2])


@pytest.mark.parametrize("chunk", [b"", b"\x07abc", b"\x01", b"\x01short"])
def test_garbage_is_not_a_frame(chunk: bytes) -> None:
    with pytest.raises(WireError, match="garbage"):
        Assembler(1000).feed(chunk)


def test_damaged_messages_are_refused_and_nothing_else_happens() -> None:
    whole = b"".join(encode(Message(everything(), 5, "train")))
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
