"""Messages as bytes: a protobuf header without the arrays, then the raw arrays.

Flower's own protobuf conversion copies an array several times (0.8 ms to write one of
512 KiB, against 0.05 ms here), so arrays travel beside the header. Nothing is pickled.

A payload is ``header length | buffer count | (cast, length) per buffer | header |
buffers``; a frame is ``kind | fields | payload``. Each buffer starts at a multiple of
64 bytes of its frame, so that a tensor can use the memory in which it arrived. Over
gRPC, a frame longer than `CHUNK` is split into chunks. One byte in front of each chunk
says whether more chunks follow.
"""

import struct
from collections.abc import Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.app.message.message import make_message
from flwr.common import serde
from flwr.common.serde_utils import (
    error_from_proto,
    error_to_proto,
    metadata_from_proto,
    metadata_to_proto,
    record_value_dict_from_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import Array as ProtoArray
from flwr.proto.recorddict_pb2 import ArrayRecord as ProtoArrayRecord
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from torch import Tensor

from flower_vfl.protocol.lazy_array import Buffer, LazyArray, ReceivedArray

from .settings import CHUNK

REQUEST: Final = b"Q"
REPLY: Final = b"R"
END: Final = b"E"  # kind of a frame that ends the session; its payload is the reason
FRAME_OVERHEAD: Final = 64  # most bytes that a frame adds to its payload

_KINDS: Final = {
    "array_record": ArrayRecord,
    "metric_record": MetricRecord,
    "config_record": ConfigRecord,
}
_EMPTY: Final[dict[Any, dict[str, Any]]] = {
    kind: vars(kind()) for kind in (*_KINDS.values(), RecordDict)
}
_NUMPY: Final = "numpy.ndarray"
_HEAD: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<BQ")
_FRAME_HEAD: Final = struct.Struct("<cQQQ")  # kind, session, two sequence numbers
ALIGNMENT: Final = 64  # of arrays in a frame, in bytes
LAST: Final = b"\x00"
_MORE: Final = b"\x01"
_UNCAST: Final = 0
_CASTS: Final = (torch.float32, torch.float16, torch.bfloat16)
_PIECE: Final = 1 << 14


class WireError(ValueError):
    """The other end sent bytes that do not follow the protocol."""


# --- half precision ---------------------------------------------------------------


def _copy(target: Tensor, source: Tensor) -> None:
    """Convert values in pieces that are too small for torch to start its threads."""
    for start in range(0, len(source), _PIECE):
        target[start : start + _PIECE] = source[start : start + _PIECE]


def _fits(values: npt.NDArray[np.float32], dtype: torch.dtype) -> bool:
    """Return whether all finite values stay finite in a type."""
    largest = torch.finfo(dtype).max
    if np.abs(values).max(initial=0.0) <= largest:
        return True
    finite = values[np.isfinite(values)]
    return bool(np.abs(finite).max(initial=0.0) <= largest)


def _cast_down(array: Array, wire_dtype: str | None) -> tuple[int, tuple[Buffer, ...]]:
    """Return the code of the cast and the bytes to send."""
    sent = array.buffers() if isinstance(array, LazyArray) else (array.data,)
    if wire_dtype is None or (array.dtype, array.stype) != ("float32", _NUMPY):
        return _UNCAST, sent
    values = np.load(BytesIO(array.data), allow_pickle=False)
    dtype = getattr(torch, wire_dtype)
    if values.dtype != np.float32 or not _fits(values, dtype):
        return _UNCAST, sent
    half = torch.empty(values.size, dtype=dtype)
    _copy(half, torch.from_numpy(values.reshape(-1)))
    bits = half.view(torch.int16).numpy().astype("<i2", copy=False)
    return _CASTS.index(dtype), (bits.tobytes(),)


def _cast_up(cast: int, data: memoryview, shape: tuple[int, ...]) -> memoryview:
    """Return the bytes of the sender's array, rounded to half precision."""
    if cast == _UNCAST:
        return data
    if cast >= len(_CASTS):
        raise WireError(f"unknown cast {cast}")
    bits = np.frombuffer(data, dtype="<i2").astype(np.int16)
    values = torch.empty(len(bits), dtype=torch.float32)
    _copy(values, torch.from_numpy(bits).view(_CASTS[cast]))
    buffer = BytesIO()
    np.save(buffer, values.reshape(shape).numpy(), allow_pickle=False)
    return buffer.getbuffer()


# --- messages ---------------------------------------------------------------------


def encode(message: Message, wire_dtype: str | None = None) -> list[Buffer]:
    """Return the payload of a message as a list of buffers."""
    arrays: list[tuple[Buffer, ...]] = []
    table: list[bytes] = []
    items = []
    for key, record in message.content.items() if message.has_content() else ():
        if isinstance(record, ArrayRecord):
            heads = ProtoArrayRecord()
            for name, array in record.items():
                cast, data = _cast_down(array, wire_dtype)
                arrays.append(data)
                table.append(_ENTRY.pack(cast, size(data)))
                head = ProtoArray(
                    dtype=array.dtype, shape=array.shape, stype=array.stype
                )
                heads.items.append(ProtoArrayRecord.Item(key=name, value=head))
            items.append(ProtoRecordDict.Item(key=key, array_record=heads))
        elif isinstance(record, MetricRecord):
            metrics = serde.metric_record_to_proto(record)
            items.append(ProtoRecordDict.Item(key=key, metric_record=metrics))
        else:
            config = serde.config_record_to_proto(record)
            items.append(ProtoRecordDict.Item(key=key, config_record=config))
    header = ProtoMessage(
        metadata=metadata_to_proto(message.metadata),
        content=ProtoRecordDict(items=items) if message.has_content() else None,
        error=error_to_proto(message.error) if message.has_error() else None,
    ).SerializeToString()
    parts: list[Buffer] = [_HEAD.pack(len(header), len(table)), *table, header]
    position = size(parts)
    for data in arrays:
        padding = _padding(position)
        parts += (bytes(padding), *data)
        position += padding + size(data)
    return parts


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
    position = start + header_length
    if position > len(view):
        raise WireError("payload shorter than its header says")
    entries = _ENTRY.iter_unpack(view[_HEAD.size : start])
    header = ProtoMessage.FromString(view[start:position])
    records: dict[str, object] = {}
    for item in header.content.items:
        kind = _KINDS[item.WhichOneof("value")]
        record = getattr(item, item.WhichOneof("value")).items
        values: dict[str, object] = {}
        if kind is not ArrayRecord:
            found = {each.key: each.value for each in record}
            values = record_value_dict_from_proto(found)
        for each in record if kind is ArrayRecord else ():
            cast, length = next(entries)
            begin = position + _padding(position)
            position = begin + length
            if position > len(view):
                raise WireError("payload shorter than its arrays")
            head, shape = each.value, tuple(each.value.shape)
            data = _cast_up(cast, view[begin:position], shape)
            values[each.key] = ReceivedArray(head.dtype, shape, head.stype, data)
        records[item.key] = _unchecked(kind, values)
    if position < len(view) or next(entries, None) is not None:
        raise WireError("bytes left over after the last array")
    has_content = header.HasField("content")
    return make_message(
        metadata=metadata_from_proto(header.metadata),
        content=_unchecked(RecordDict, records) if has_content else None,
        error=error_from_proto(header.error) if header.HasField("error") else None,
    )


def _unchecked(kind: Any, data: dict[str, object]) -> Any:
    """Return a record of Flower with values whose types protobuf has checked.

    Flower checks the type of every entry again, which takes longer than all the rest.
    """
    record = kind.__new__(kind)
    record.__dict__.update(_EMPTY[kind], _data=data)
    return record


def _padding(position: int) -> int:
    """Return the bytes between a position in a payload and the next buffer."""
    return -(_FRAME_HEAD.size + position) % ALIGNMENT


# --- frames -----------------------------------------------------------------------


class FrameHead(NamedTuple):
    """The session of a request or a reply, and sequence numbers."""

    session: int
    sequence: int
    oldest: int  # unanswered request of the session; 0 in a reply


def frame_head(kind: bytes, session: int, sequence: int, oldest: int = 0) -> bytes:
    """Return the head of a request, with its oldest unanswered one, or of a reply."""
    return _FRAME_HEAD.pack(kind, session, sequence, oldest)


def read_frame_head(frame: memoryview) -> tuple[FrameHead, memoryview]:
    """Return the head and the payload of a request or a reply."""
    if len(frame) < _FRAME_HEAD.size:
        raise WireError("malformed frame")
    _, *head = _FRAME_HEAD.unpack_from(frame)
    return FrameHead(*head), frame[_FRAME_HEAD.size :]


def size(parts: Sequence[Buffer]) -> int:
    """Return the number of bytes of a frame or payload."""
    return sum(map(len, parts))


def split_frame(parts: Sequence[Buffer]) -> list[bytes]:
    """Return the chunks of a frame."""
    if size(parts) <= CHUNK:
        return [b"".join((LAST, *parts))]
    whole = memoryview(b"".join(parts))
    chunks = [whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK)]
    return [
        *(b"".join((_MORE, chunk)) for chunk in chunks[:-1]),
        b"".join((LAST, chunks[-1])),
    ]


class Assembler:
    """Joins the chunks of frames."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._chunks: list[memoryview] = []
        self._size = 0

    def feed(self, data: bytes) -> memoryview | None:
        """Add a chunk and return the frame that it completes, if any."""
        flag, chunk = data[:1], memoryview(data)[1:]
        if flag not in (LAST, _MORE) or (flag == _MORE and len(chunk) != CHUNK):
            raise WireError("malformed frame")
        self._size += len(chunk)
        if self._size > self.limit:
            raise WireError(f"frame over the limit of {self.limit} bytes")
        if flag == LAST and not self._chunks:
            self._size = 0
            return chunk
        self._chunks.append(chunk)
        if flag == _MORE:
            return None
        whole = memoryview(b"".join(self._chunks))
        self._chunks, self._size = [], 0
        return whole
