"""The messages of vertical training: the only file that names types and record keys.

A run begins with ``HELLO`` (who are you?) and ``CONFIGURE`` (these are the terms), with
``ALIGN`` in between where ids are aligned (`flower_vfl.alignment.messages`). A training
step is one ``FORWARD`` to each passive party, which brings the gradient of the
step before and asks for the next embedding, and one ``TRAIN_STEP`` to the label party, which
brings the embeddings and returns one gradient per passive party. ``EMBED`` with
``EVALUATE`` or ``PREDICT`` do the same without training. ``BACKWARD`` brings a gradient
alone, ``CHECKPOINT`` and ``RESTORE`` keep and bring back a party's state.

Every request carries a ``turn`` that grows; a party that gets the same turn again
answers with the same reply and does nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from flower_vfl.errors import (
    ConfigError,
    PartyError,
    PartyRestartedError,
    VerticalError,
)

from .arrays import to_array, to_tensor
from .config import PartyDescription, Role, Shape, TrainingConfig

VERSION = 3
_CONFIG, _ARRAYS, _METRICS, _LABELS = "vfl", "vfl-arrays", "vfl-metrics", "vfl-labels"
_GRADIENT = "gradient"
# Every entry of a record costs a type check, so the numbers of a step share one entry.
_AT = "at"
_NUMBERS = ("turn", "step", "epoch", "index", "gradient-step")
_ABSENT = -1

Value = int | float | str | bytes | bool | list[int] | list[str] | list[bytes]


class Verb(StrEnum):
    """The message types."""

    HELLO = "query.vfl_hello"
    ALIGN = "query.vfl_align"
    CONFIGURE = "query.vfl_configure"
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

    def number(self, key: str) -> int:
        """Return a whole number of the config."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"message entry '{key}' must be a whole number")
        return value

    def text(self, key: str) -> str:
        """Return a text of the config."""
        value = self._get(key)
        if not isinstance(value, str):
            raise ConfigError(f"message entry '{key}' must be a text")
        return value

    def _get(self, key: str) -> Value:
        if key not in self.config:
            raise ConfigError(
                f"the message has no '{key}'; do all parties run one version of "
                "flower-vfl?"
            )
        return self.config[key]

    def tensors(self) -> dict[str, Tensor]:
        """Return the arrays as tensors."""
        tensors = {}
        for name, array in self.arrays.items():
            try:
                tensors[name] = to_tensor(array)
            except ConfigError as error:
                remedy = "Run one version of flower-vfl at every party"
                raise PartyError(name, str(error), remedy) from error
        return tensors

    def gradient(self) -> Tensor | None:
        """Return the gradient that a request to a passive party carries, if any."""
        array = self.arrays.get(_GRADIENT)
        return None if array is None else to_tensor(array)

    def records(self) -> RecordDict:
        """Return the content as Flower records."""
        config = dict(self.config)
        numbers = [config.pop(key, _ABSENT) for key in _NUMBERS]
        records = RecordDict()
        if self.config or not self.arrays:
            records[_CONFIG] = ConfigRecord({_AT: cast(list[int], numbers), **config})
        if self.arrays:
            records[_ARRAYS] = array_record(self.arrays)
        if self.metrics:
            records[_METRICS] = MetricRecord(dict(self.metrics))
        if self.labels is not None:
            records[_LABELS] = array_record({"labels": self.labels})
        return records


def read(message: Message) -> Content:
    """Return the content of a request or reply."""
    records = message.content
    if _CONFIG not in records and _ARRAYS not in records:
        raise ConfigError(
            f"a message of type '{message.metadata.message_type}' has no '{_CONFIG}' "
            "record: it is not one of flower-vfl's"
        )
    # Flower's views by kind (records.array_records, ...) are rebuilt at every use.
    content = Content(config=cast(dict[str, Value], _entries(records, _CONFIG)))
    numbers = cast(list[int], content.config.pop(_AT, []))
    for key, number in zip(_NUMBERS, numbers, strict=False):
        if number != _ABSENT:
            content.config[key] = number
    content.arrays = cast(dict[str, Array], _entries(records, _ARRAYS))
    content.metrics = cast(dict[str, float], _entries(records, _METRICS))
    if _LABELS in records:
        content.labels = cast(Array, records[_LABELS]["labels"])
    return content


def _entries(records: RecordDict, key: str) -> dict[str, Any]:
    return dict(records[key].items()) if key in records else {}


def array_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return arrays as one record, without the copies that Flower would make."""
    if isinstance(arrays, ArrayRecord):
        return arrays
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record


def request(verb: Verb, node: int, turn: int, content: Content) -> Message:
    """Return a request to one node."""
    content.config["turn"] = turn
    return Message(
        content.records(), dst_node_id=node, message_type=verb.value, group_id=str(turn)
    )


def gradient_arrays(gradient: Array | None) -> dict[str, Array]:
    """Return the arrays of a request that brings a gradient."""
    return {} if gradient is None else {_GRADIENT: gradient}


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return tensors as arrays."""
    return {name: to_array(tensor) for name, tensor in tensors.items()}


def error_content(error: Exception, party: str) -> Content:
    """Return the reply of a party at which something went wrong."""
    if not isinstance(error, PartyError):
        expected = isinstance(error, VerticalError)
        problem = str(error) if expected else f"{type(error).__name__}: {error}"
        remedy = "Correct this setting" if expected else "That node's log has more"
        error = PartyError(party, problem, remedy)
    return Content(
        config={
            "error": error.problem,
            "party": error.party,
            "remedy": error.remedy,
            **({} if error.step is None else {"step": error.step}),
            "restarted": isinstance(error, PartyRestartedError),
        }
    )


def raise_error(content: Content, step: int | None) -> None:
    """Raise what :func:`error_content` packed, if it did."""
    if "error" not in content.config:
        return
    at = content.number("step") if "step" in content.config else step
    kind = PartyRestartedError if content.config.get("restarted") else PartyError
    raise kind(
        content.text("party"),
        content.text("error"),
        content.text("remedy"),
        at,
    )


def pack_config(terms: TrainingConfig) -> dict[str, Value]:
    """Return the terms of a run as the config of a message."""
    return {
        "seed": terms.seed,
        "batch-size": terms.batch_size,
        "evaluation-rows": terms.evaluation_rows,
        "test-fraction": float(terms.test_fraction),
        "valid-fraction": float(terms.valid_fraction),
        "parties": list(terms.parties),
        "shapes": [_shape_text(shape) for shape in terms.parties.values()],
        "aggregation": terms.aggregation,
        "learning-rate": float(terms.learning_rate),
        "defended": terms.defended,
        "defense": terms.defense,
        "leakage": terms.leakage,
        "noise-seed": terms.noise_seed,
    }


def unpack_config(content: Content) -> TrainingConfig:
    """Return the terms that a message carries."""
    config = content.config
    names, shapes = (
        cast(list[str], config["parties"]),
        cast(list[str], config["shapes"]),
    )
    return TrainingConfig(
        seed=content.number("seed"),
        batch_size=content.number("batch-size"),
        evaluation_rows=content.number("evaluation-rows"),
        test_fraction=cast(float, config["test-fraction"]),
        valid_fraction=cast(float, config["valid-fraction"]),
        parties={n: _read_shape(s) for n, s in zip(names, shapes, strict=True)},
        aggregation=content.text("aggregation"),
        learning_rate=cast(float, config["learning-rate"]),
        defended=content.text("defended"),
        defense=content.text("defense"),
        leakage=content.text("leakage"),
        noise_seed=content.text("noise-seed"),
    )


def pack_description(description: PartyDescription, versions: str) -> dict[str, Value]:
    """Return a party's description as the config of a message."""
    return {
        "protocol": VERSION,
        "versions": versions,
        "name": description.name,
        "role": description.role,
        "rows": description.rows,
        "shape": _shape_text(description.shape),
        "task": description.task,
        "ids-digest": description.ids_digest,
        "split-digest": description.split_digest,
        "checkpoints": list(description.checkpoints),
        "aligned": description.aligned,
    }


def unpack_description(content: Content) -> PartyDescription:
    """Return the description that a reply carries."""
    return PartyDescription(
        name=content.text("name"),
        role=cast(Role, content.text("role")),
        rows=content.number("rows"),
        shape=_read_shape(content.text("shape")),
        task=content.text("task"),
        ids_digest=content.text("ids-digest"),
        split_digest=content.text("split-digest"),
        checkpoints=tuple(cast(list[str], content.config["checkpoints"])),
        aligned=content.text("aligned"),
    )


def _shape_text(shape: Shape) -> str:
    return "x".join(str(size) for size in shape)


def _read_shape(text: str) -> Shape:
    if not re.fullmatch(r"(\d+(x\d+)*)?", text):
        raise ConfigError(f"'{text}' is not the shape of an embedding")
    return tuple(int(size) for size in text.split("x")) if text else ()
