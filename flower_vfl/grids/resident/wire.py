"""Messages as bytes: a protobuf header without the arrays, then the raw arrays.

Flower's own protobuf conversion copies an array several times (0.8 ms to write one of
512 KiB, against 0.05 ms here), so arrays travel beside the header. Nothing is pickled.

A payload is ``header length | buffer count | (cast, length) per buffer | header |
buffers``; a frame is ``kind | fields | payload``; a frame longer than `CHUNK` is sent
in pieces, each with one byte in front that says whether more follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from io import BytesIO
from math import prod
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import (
    config_record_from_proto,
    config_record_to_proto,
    metric_record_from_proto,
    metric_record_to_proto,
)
from flwr.common.serde_utils import (
    error_from_proto,
    error_to_proto,
    metadata_from_proto,
    metadata_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import Array as ProtoArray
from flwr.proto.recorddict_pb2 import ArrayRecord as ProtoArrayRecord
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from . import half_precision as half
from .settings import CHUNK

Buffer = bytes | memoryview

NUMPY_STYPE: Final = "numpy.ndarray"
RAW_STYPE: Final = "flower_vfl.raw"
_HEAD: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<BQ")
_LAST: Final = b"\x00"
_MORE: Final = b"\x01"
_UNCAST: Final = 0
_CASTS: Final = ("", "float16", "bfloat16")


class WireError(ValueError):
    """Bytes that are not what the other end should have sent."""


# --- half precision ---------------------------------------------------------------


def _floats_of(array: Array) -> half.Floats | None:
    """Return the values of a float32 array that this module knows how to read."""
    if array.dtype != "float32":
        return None
    if array.stype == RAW_STYPE and len(array.data) == 4 * prod(array.shape):
        return np.frombuffer(array.data, dtype="<f4")
    if array.stype == NUMPY_STYPE:
        values = np.load(BytesIO(array.data), allow_pickle=False)
        if values.dtype == np.float32:
            return np.ascontiguousarray(values).reshape(-1)
    return None


def _cast_down(array: Array, wire_dtype: str | None) -> tuple[int, Buffer]:
    """Return the cast's code and the bytes to send.

    An array whose finite values do not fit into half precision is sent as it is.
    """
    values = _floats_of(array) if wire_dtype else None
    if values is None or wire_dtype is None or not half.fits(values, wire_dtype):
        return _UNCAST, array.data
    return _CASTS.index(wire_dtype), half.shrink(values, wire_dtype)


def _cast_up(cast: int, data: memoryview, stype: str, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that the sender's array held, as far as half precision keeps."""
    if cast == _UNCAST:
        return bytes(data)
    if cast >= len(_CASTS):
        raise WireError(f"unknown cast {cast}")
    values = half.widen(data, _CASTS[cast]).astype("<f4", copy=False)
    if stype != NUMPY_STYPE:
        return values.tobytes()
    buffer = BytesIO()
    np.save(buffer, values.reshape(shape), allow_pickle=False)
    return buffer.getvalue()


# --- messages ---------------------------------------------------------------------


def encode(message: Message, wire_dtype: str | None = None) -> list[Buffer]:
    """Return the payload of a message as a list of buffers, to be joined once."""
    buffers: list[Buffer] = []
    table: list[bytes] = []
    proto = ProtoMessage(metadata=metadata_to_proto(message.metadata))
    if message.has_error():
        proto.error.CopyFrom(error_to_proto(message.error))
    if message.has_content():
        items = []
        for key, record in message.content.items():
            item = ProtoRecordDict.Item(key=key)
            if isinstance(record, ArrayRecord):
                arrays = []
                for name, array in record.items():
                    cast, data = _cast_down(array, wire_dtype)
                    buffers.append(data)
                    table.append(_ENTRY.pack(cast, len(data)))
                    head = ProtoArray(
                        dtype=array.dtype, shape=array.shape, stype=array.stype
                    )
                    arrays.append(ProtoArrayRecord.Item(key=name, value=head))
                item.array_record.CopyFrom(ProtoArrayRecord(items=arrays))
            elif key in message.content.metric_records:
                metric = message.content.metric_records[key]
                item.metric_record.CopyFrom(metric_record_to_proto(metric))
            else:
                config = message.content.config_records[key]
                item.config_record.CopyFrom(config_record_to_proto(config))
            items.append(item)
        proto.content.CopyFrom(ProtoRecordDict(items=items))
    header = proto.SerializeToString()
    return [_HEAD.pack(len(header), len(table)), *table, header, *buffers]


def decode(payload: Buffer) -> Message:
    """Return the message of a payload."""
    try:
        return _decode(memoryview(payload))
    except WireError:
        raise
    except Exception as ex:  # protobuf and Flower raise many types on bad bytes
        raise WireError(f"not a message: {type(ex).__name__}: {ex}") from ex


def _decode(view: memoryview) -> Message:
    header_length, count = _HEAD.unpack_from(view)
    start = _HEAD.size + count * _ENTRY.size
    if start + header_length > len(view):
        raise WireError("payload shorter than its header says")
    entries = _ENTRY.iter_unpack(view[_HEAD.size : start])
    proto = ProtoMessage.FromString(bytes(view[start : start + header_length]))
    rest = view[start + header_length :]
    content = None
    if proto.HasField("content"):
        content, rest = _content(proto.content, entries, rest)
    if len(rest) or next(entries, None) is not None:
        raise WireError("bytes left over after the last array")
    error = error_from_proto(proto.error) if proto.HasField("error") else None
    return make_message(metadata_from_proto(proto.metadata), content, error)


def _content(
    proto: ProtoRecordDict, entries: Iterator[tuple[int, int]], rest: memoryview
) -> tuple[RecordDict, memoryview]:
    content = RecordDict()
    for item in proto.items:
        field = item.WhichOneof("value")
        if field == "array_record":
            arrays: dict[str, Array] = {}
            for entry in item.array_record.items:
                cast, length = next(entries)
                if length > len(rest):
                    raise WireError("payload shorter than its arrays")
                head, shape = entry.value, tuple(entry.value.shape)
                data = _cast_up(cast, rest[:length], head.stype, shape)
                rest = rest[length:]
                arrays[entry.key] = Array(head.dtype, shape, head.stype, data)
            content[item.key] = ArrayRecord(arrays, keep_input=False)
        elif field == "metric_record":
            content[item.key] = metric_record_from_proto(item.metric_record)
        elif field == "config_record":
            content[item.key] = config_record_from_proto(item.config_record)
        else:
            raise WireError(f"unknown kind of record for '{item.key}'")
    return content, rest


# --- frames -----------------------------------------------------------------------


def size(parts: Sequence[Buffer]) -> int:
    """Return the number of bytes in the parts of a frame."""
    return sum(map(len, parts))


def chunks(parts: Sequence[Buffer]) -> list[bytes]:
    """Return the pieces in which a frame travels."""
    if size(parts) <= CHUNK:
        return [b"".join((_LAST, *parts))]
    whole = memoryview(b"".join(parts))
    pieces = [whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK)]
    return [
        *(b"".join((_MORE, piece)) for piece in pieces[:-1]),
        b"".join((_LAST, pieces[-1])),
    ]


class Assembler:
    """Puts the pieces of a frame together again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pieces: list[memoryview] = []
        self._size = 0

    def feed(self, chunk: bytes) -> memoryview | None:
        """Take a piece; return the frame that it completes, or None."""
        flag, piece = chunk[:1], memoryview(chunk)[1:]
        if flag not in (_LAST, _MORE) or (flag == _MORE and len(piece) != CHUNK):
            raise WireError("garbage instead of a frame")
        self._size += len(piece)
        if self._size > self.limit:
            raise WireError(f"frame over the limit of {self.limit} bytes")
        if flag == _LAST and not self._pieces:
            self._size = 0
            return piece
        self._pieces.append(piece)
        if flag == _MORE:
            return None
        whole = memoryview(b"".join(self._pieces))
        self._pieces, self._size = [], 0
        return whole
