"""The messages of vertical training (docs/architecture.md), and tensors in them."""

import math
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.task_identity import TaskIdentity
from numpy.lib import format as npy
from torch import Tensor

from flower_vfl.errors import (
    ConfigError,
    PartyError,
    PartyRestartedError,
    TableError,
    VerticalError,
)
from flower_vfl.records import Measurement, from_columns, to_columns

from .config import SAME_VERSION, Value
from .lazy_array import Buffer, LazyArray

T = TypeVar("T")

VERSION = 8
_CONFIG, _ARRAYS, _METRICS, _LABELS = "vfl", "vfl-arrays", "vfl-metrics", "vfl-labels"
_MEASURED, _NUMBERS = "vfl-measured", "numbers"
_KINDS: dict[str, type] = {_CONFIG: ConfigRecord, _MEASURED: ConfigRecord}
_KINDS |= {_ARRAYS: ArrayRecord, _LABELS: ArrayRecord, _METRICS: MetricRecord}
GRADIENT = "gradient"
CLEAN = "clean"  # the gradient before the defense, for measuring every layer
_STYPE = "numpy.ndarray"
_ALIGNMENT = 64  # of the memory of torch's own tensors, in bytes
# Flower checks the type of every entry and every argument, which takes longer than a
# small layer. What has the right types already is made as Flower does, without checks.
_NO_CONFIG, _NO_ARRAYS = vars(ConfigRecord()), vars(ArrayRecord())
_NO_RECORDS = vars(RecordDict())


class Verb(StrEnum):
    """The message types."""

    HELLO = "query.vfl_hello"
    ALIGN = "query.vfl_align"
    CONFIGURE = "query.vfl_configure"
    SEAL = "query.vfl_seal"
    FORWARD = "train.vfl_forward"
    TRAIN_STEP = "train.vfl_step"
    BACKWARD = "train.vfl_backward"
    EMBED = "evaluate.vfl_embed"
    EVALUATE = "evaluate.vfl_evaluate"
    PREDICT = "query.vfl_predict"
    SERVE = "query.vfl_serve"
    CHECKPOINT = "query.vfl_checkpoint"
    RESTORE = "query.vfl_restore"


@dataclass
class Content:
    """What a request or a reply carries."""

    config: dict[str, Value] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    labels: Array | None = None
    measured: list[Measurement] = field(default_factory=list)
    step: int = 0
    epoch: int = 0
    index: int = 0
    gradient_step: int = 0
    turn: int = 0

    def number(self, key: str) -> int:
        """Return a whole number of the config."""
        return self._get(key, int, "a whole number")

    def text(self, key: str) -> str:
        """Return a text of the config."""
        return self._get(key, str, "a text")

    def _get(self, key: str, kind: type[T], wanted: str) -> T:
        value = self.config.get(key)
        if key not in self.config:
            raise ConfigError(f"the message has no '{key}'; {SAME_VERSION}")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"message entry '{key}' must be {wanted}")
        return value

    def tensors(self, encoded: bool = False) -> dict[str, Tensor]:
        """Return the arrays as tensors: of floats, unless a codec has encoded them."""
        tensors = {}
        for name, array in self.arrays.items():
            try:
                tensors[name] = to_tensor(array) if encoded else to_floats(array)
            except ConfigError as error:
                remedy = "Run one version of flower-vfl at every party"
                raise PartyError(name, str(error), remedy) from error
        return tensors

    def records(self) -> RecordDict:
        """Return the content as Flower records."""
        numbers = [self.turn, self.step, self.epoch, self.index, self.gradient_step]
        records: dict[str, Any] = {}
        if self.config:
            records[_CONFIG] = ConfigRecord(dict(self.config))
            records[_CONFIG].__dict__["_data"][_NUMBERS] = numbers
        elif any(numbers) or not self.arrays:
            records[_CONFIG] = ConfigRecord.__new__(ConfigRecord)
            records[_CONFIG].__dict__.update(_NO_CONFIG, _data={_NUMBERS: numbers})
        if self.arrays:
            records[_ARRAYS] = ArrayRecord.__new__(ArrayRecord)
            records[_ARRAYS].__dict__.update(_NO_ARRAYS, _data=dict(self.arrays))
        if self.metrics:
            records[_METRICS] = MetricRecord(dict(self.metrics))
        if self.measured:
            records[_MEASURED] = ConfigRecord.__new__(ConfigRecord)
            columns = to_columns(self.measured)
            columns["value"] = [*map(float, columns["value"])]
            records[_MEASURED].__dict__.update(_NO_CONFIG, _data=columns)
        if self.labels is not None:
            records[_LABELS] = ArrayRecord({"labels": self.labels})
        found = RecordDict.__new__(RecordDict)
        found.__dict__.update(_NO_RECORDS, _data=records)
        return found

    def size(self) -> int:
        """Return the bytes of all arrays."""
        arrays = [*self.arrays.values()]
        if self.labels is not None:
            arrays.append(self.labels)
        return sum(math.prod(each.shape) * _item_size(each.dtype) for each in arrays)


def request(verb: Verb, node: int, turn: int, content: Content) -> Message:
    """Return a request to one node."""
    content.turn = turn
    known = _first_request(verb, node, TaskIdentity.run_id)
    message, metadata = Message.__new__(Message), Metadata.__new__(Metadata)
    metadata.__dict__.update(known, _group_id=str(turn), _created_at=time.time())
    records = content.records()
    message.__dict__.update(_metadata=metadata, _content=records, _error=None)
    return message


@lru_cache(maxsize=4096)
def _first_request(verb: Verb, node: int, run: int) -> dict[str, Any]:
    """Return the metadata of Flower's own request."""
    return vars(Message(RecordDict(), node, verb.value).metadata)


def reply_to(message: Message, records: RecordDict) -> Message:
    """Return the reply to a message."""
    answer, metadata = Message.__new__(Message), Metadata.__new__(Metadata)
    asked, now = vars(message.metadata), time.time()
    metadata.__dict__.update(
        asked,
        _message_id="",
        _delivered_at="",
        _src_node_id=asked["_dst_node_id"],
        _dst_node_id=asked["_src_node_id"],
        _src_task_id=asked["_dst_task_id"],
        _dst_task_id=asked["_src_task_id"],
        _reply_to_message_id=asked["_message_id"],
        _created_at=now,
        _ttl=asked["_created_at"] + asked["_ttl"] - now,
    )
    answer.__dict__.update(_metadata=metadata, _content=records, _error=None)
    return answer


def read(message: Message) -> Content:
    """Return the content of a request or reply."""
    records = dict(message.content.items())
    kind = message.metadata.message_type
    for key, record in records.items():
        if not isinstance(record, _KINDS.get(key, object)):
            raise ConfigError(f"message '{kind}' has a wrong kind of '{key}' record")
    content = Content()
    # Flower's views by kind (records.array_records, ...) are rebuilt at every use.
    if _CONFIG in records:
        config = cast(dict[str, Any], dict(records[_CONFIG].items()))
        numbers = config.pop(_NUMBERS, ())
        if not isinstance(numbers, list) or [*map(type, numbers)] != [int] * 5:
            raise ConfigError(
                f"message '{kind}' lacks its five numbers; {SAME_VERSION}"
            )
        content = Content(config)
        content.turn, content.step, content.epoch = numbers[:3]
        content.index, content.gradient_step = numbers[3:]
    elif _ARRAYS not in records:
        raise ConfigError(f"message '{kind}' is not one of flower-vfl's")
    if _ARRAYS in records:
        content.arrays = cast(ArrayRecord, records[_ARRAYS])
    if _METRICS in records:
        content.metrics = cast(dict[str, float], dict(records[_METRICS].items()))
        if any(isinstance(value, list) for value in content.metrics.values()):
            raise ConfigError(f"message '{kind}' has a list as a metric")
    try:
        if _MEASURED in records:
            content.measured = from_columns(cast(dict[str, Any], records[_MEASURED]))
        if _LABELS in records:
            content.labels = cast(Array, records[_LABELS]["labels"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"message '{kind}' lacks {error}") from error
    return content


def error_content(error: Exception, party: str) -> Content:
    """Return the reply of a party at which something went wrong."""
    if not isinstance(error, PartyError):
        if isinstance(error, TableError):
            problem = "its table cannot be used"
            remedy = "The log of that node says why"
        elif isinstance(error, VerticalError):
            problem, remedy = str(error), "Correct this setting"
        else:  # its text may quote the party's data, and stays in the log of the node
            frame = traceback.extract_tb(error.__traceback__)[-1:]
            where = "".join(f" in {Path(f.filename).name}:{f.lineno}" for f in frame)
            problem = f"an unexpected {type(error).__name__} arose{where}"
            remedy = "The log of that node has its text"
        error = PartyError(party, problem, remedy)
    config: dict[str, Value] = {"error": error.problem, "party": error.party}
    if error.step is not None:
        config["step"] = error.step
    restarted = isinstance(error, PartyRestartedError)
    return Content({**config, "remedy": error.remedy, "restarted": restarted})


def raise_error(content: Content, step: int | None) -> None:
    """Raise what :func:`error_content` packed; `step` is that of the request."""
    kind = PartyRestartedError if content.config.get("restarted") else PartyError
    party, problem, remedy = map(content.text, ("party", "error", "remedy"))
    step = content.number("step") if "step" in content.config else step
    raise kind(party, problem, remedy, step)


class TensorArray(LazyArray):
    """A Flower array that keeps its tensor and makes the bytes when they are read."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:  # numpy has no such type
            tensor = tensor.float()
        # Past Array's checks of four optional arguments, which cost more than the rest.
        dtype, shape = _dtype_name(tensor.dtype), tuple(tensor.shape)
        self.__dict__.update(tensor=tensor, dtype=dtype, shape=shape, stype=_STYPE)

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the header of an ``.npy`` file and the memory of the tensor."""
        tensor: Tensor = self.__dict__["tensor"]
        flat = tensor.cpu().contiguous().numpy().reshape(-1)
        return _header(self.dtype, self.shape), flat.view(np.uint8).data


# Flower writes the name of the class into what it sends and looks it up on arrival.
TensorArray.__name__ = TensorArray.__qualname__ = Array.__qualname__


def to_tensor(array: Array) -> Tensor:
    """Return a Flower array as a tensor, which must not be changed in place."""
    if isinstance(array, TensorArray):
        tensor: Tensor = array.__dict__["tensor"]
        return tensor
    shape = tuple(array.shape)
    try:
        header = _header(array.dtype, shape)
        data = array.buffers()[0] if isinstance(array, LazyArray) else array.data
        if array.stype == _STYPE and data[: len(header)] == header:
            flat = np.frombuffer(data, np.dtype(array.dtype), offset=len(header))
            address, readonly = flat.__array_interface__["data"]
            # Results may depend on the alignment, and torch wants to own what it reads.
            if readonly or address % _ALIGNMENT:
                flat = flat.copy()
            return torch.from_numpy(flat.reshape(shape))
        found = from_npy(array.data)
        same = found.shape == shape and _dtype_name(found.dtype) == array.dtype
        if not same or array.stype != _STYPE:
            told = f"its bytes are {found.dtype} of shape {tuple(found.shape)}"
            raise ValueError(told)
        return found
    except Exception as error:  # numpy raises many types on bad bytes
        raise ConfigError(
            f"an array of type {array.dtype} and shape {shape} cannot be read: {error}"
        ) from error


def to_floats(array: Array) -> Tensor:
    """Return an embedding or a gradient as a tensor."""
    tensor = to_tensor(array)
    if not tensor.is_floating_point():
        raise ConfigError(f"an array of {tensor.dtype} came instead of floats")
    return tensor


def from_npy(data: bytes) -> Tensor:
    """Return a copy of the array of an ``.npy`` file, or raise an error."""
    size = 10 + int.from_bytes(data[8:10], "little")
    shape, fortran, dtype = _read_header(data[:size])
    flat = np.frombuffer(data, dtype, offset=size)
    return torch.from_numpy(flat.reshape(shape, order="F" if fortran else "C").copy())


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache
def _item_size(dtype: str) -> int:
    """Return the bytes of a number; 0 for a type that `to_tensor` refuses."""
    try:
        return np.dtype(dtype).itemsize
    except Exception:  # numpy raises many types on a bad name
        return 0


@lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    buffer, descr = BytesIO(), npy.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


@lru_cache
def _read_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = BytesIO(header)
    npy.read_magic(file)
    return npy.read_array_header_1_0(file)
