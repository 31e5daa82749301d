"""Finds the gradients in Flower messages and transforms them."""

import copy
import hashlib
import threading
from collections.abc import Callable, Sequence
from logging import INFO, WARNING
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from flwr.app.message import make_message
from flwr.app.metadata import validate_message_type
from flwr.supercore import log
from numpy.typing import ArrayLike
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.protocol.messages import to_tensor
from flower_vfl.randomness import draw_secret
from flower_vfl.rows import check_finite
from flower_vfl.strategies.defenses.registry import build_defense
from flower_vfl.transform import Batch, apply_in_order

Labels: TypeAlias = ArrayLike | Tensor
Metrics: TypeAlias = dict[str, dict[str, float]]


class MessageDefender:
    """Transforms the gradients in messages and numbers them by party."""

    # Held while a transform works. On the class, because a simulation pickles mods.
    lock: ClassVar = threading.RLock()

    def __init__(
        self,
        transform: object,
        message_type: str | Sequence[str] | None,
        record: str | None,
        arrays: str | Sequence[str] | None,
        labels: Labels | Callable[..., Labels] | None,
        party: str | Callable[..., str] | None,
        epoch: int | Callable[..., int],
        seed: int | None,
        rows: Labels | Callable[..., Labels] | None = None,
        embeddings: str | None = None,
    ) -> None:
        self.transform = build_defense(transform)
        if self.transform.requires_labels and labels is None:
            remedy = "give labels= of all rows, or a function of the message"
            raise ConfigError(f"{type(self.transform).__name__} needs labels; {remedy}")
        self.types = None if message_type is None else _full_types(message_type)
        self.record, self.arrays = record, None if arrays is None else _names(arrays)
        self._labels, self._party, self._epoch, self._seed = labels, party, epoch, seed
        self._rows, self.embeddings = rows, embeddings
        self._initial = copy.deepcopy(self.transform.state_dict())
        self.load_state_dict(None)

    def matches(self, message: Message) -> bool:
        """Return whether a message is of a type that holds gradients."""
        kind = message.metadata.message_type
        return self.types is None or _full_type(kind) in self.types

    def defend(
        self, message: Message, sent: ArrayRecord | None, *arguments: object
    ) -> tuple[Message, Metrics]:
        """Return a defended copy and its metrics; `sent` has known embeddings."""

        def value(setting: Any) -> Any:
            return setting(*arguments) if callable(setting) else setting

        party, epoch = value(self._party), value(self._epoch)
        needed = self.transform.requires_labels
        labels = _one_per_row(value(self._labels), "labels") if needed else None
        rows = None if self._rows is None else _one_per_row(value(self._rows), "rows")
        content, metrics = message.content.copy(), Metrics()
        for record, key in self._find(message):
            array = message.content.array_records[record][key]
            name = key if party is None else party
            gradient = _gradient(array, name, key, labels)
            step = self._step((name, record, key), array, labels, epoch)
            seen = self._embedding(sent, name, key, len(gradient))
            known = name, step, self.seed, labels, epoch
            batch = Batch(*known, embedding=seen, rows=rows)
            defended = self._transform(gradient, batch)
            metrics.setdefault(name, {}).update({"step": step, **batch.metrics})
            if defended is not gradient:
                changed = content.array_records[record].copy()
                changed[key] = Array(defended.detach().cpu().numpy())
                content[record] = changed
        return make_message(message.metadata, content), metrics

    def _find(self, message: Message) -> list[tuple[str, str]]:
        """Return record and key of every gradient; raise if one is missing."""
        records = message.content.array_records
        found = [
            (name, key)
            for name in records
            for key in records[name]
            if self.record in (None, name) and (not self.arrays or key in self.arrays)
        ]
        if not found or set(self.arrays or ()) - {key for _, key in found}:
            has = [f"'{key}' in '{name}'" for name in records for key in records[name]]
            needed = " and ".join(f"'{key}'" for key in self.arrays or ()) or "arrays"
            where = f" in the record '{self.record}'" if self.record else ""
            raise ConfigError(
                f"a message of type '{message.metadata.message_type}' was not sent: it "
                f"needs {needed}{where} and has {', '.join(has) or 'no arrays'}; set "
                "message_type=, record= or arrays="
            )
        return found

    def _embedding(
        self, sent: ArrayRecord | None, party: str, key: str, rows: int
    ) -> Tensor | None:
        """Return what a party sent: the array with the gradient's name, or the only."""
        if self.embeddings is None:
            return None
        found = dict(sent or {})
        array = next(iter(found.values())) if len(found) == 1 else found.get(key)
        if array is None or tuple(array.shape[:1]) != (rows,):
            has = [f"'{name}' of shape {each.shape}" for name, each in found.items()]
            sent_before = f"the record '{self.embeddings}' that came before it"
            has_rows = f"{sent_before} has {', '.join(has) or 'no arrays'}"
            problem = f"its gradient has {rows} rows; {has_rows}"
            raise PartyError(party, problem, "Correct embeddings=, a record's name")
        return to_tensor(array)

    def _step(
        self, slot: tuple[str, ...], array: Array, labels: Tensor | None, epoch: int
    ) -> int:
        """Return the number of a gradient among those of its party, for its noise.

        A gradient that is sent again keeps its number, because new noise could be
        averaged out. In another epoch it gets a new one, because the same noise on
        another scale could be solved for.
        """
        digest = hashlib.blake2b(b"%d|%b" % (epoch, array.data), digest_size=16)
        digest.update(b"" if labels is None else labels.numpy().tobytes())
        last = self.last.get(slot)
        if last is None or last[0] != digest.hexdigest():
            step = self.steps[slot[0]] = self.steps.get(slot[0], 0) + 1
            last = self.last[slot] = (digest.hexdigest(), step)
        return last[1]

    def _transform(self, gradient: Tensor, batch: Batch) -> Tensor:
        name, party, step = type(self.transform).__name__, batch.party, batch.step
        if step == 1:
            shape = "×".join(map(str, gradient.shape))
            log(INFO, "%s: first gradient for party '%s', %s", name, party, shape)
        defended = apply_in_order([self.transform], gradient, batch)
        if defended is None:
            # The app expects a gradient and does not know that it can be withheld.
            log(WARNING, "%s: party '%s', step %s: zeros sent", name, party, step)
            batch.metrics["withheld"] = 1.0
            return torch.zeros_like(gradient)
        return defended

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a restart."""
        state = {"seed": self.seed, "steps": self.steps, "last": self.last}
        return {**state, "transform": self.transform.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a saved state, or start anew with None."""
        state = state or {"seed": draw_secret(), "steps": {}, "last": {}}
        self.seed: int = state["seed"] if self._seed is None else self._seed
        self.steps: dict[str, int] = state["steps"]
        self.last: dict[tuple[str, ...], tuple[str, int]] = state["last"]
        transform = state.get("transform", self._initial)
        self.transform.load_state_dict(copy.deepcopy(transform))


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _full_type(message_type: str) -> str:
    """Return a message type with its action, as Flower looks it up."""
    return message_type if "." in message_type else f"{message_type}.default"


def _full_types(message_type: str | Sequence[str]) -> set[str]:
    names = _names(message_type)
    wrong = [name for name in names if not validate_message_type(name)]
    if wrong or not names:
        remedy = "write it as the app sends it, such as 'train.apply_gradients'"
        raise ConfigError(f"'{', '.join(wrong)}' is not a valid type; {remedy}")
    return {_full_type(name) for name in names}


def _one_per_row(values: Labels, name: str) -> Tensor:
    try:
        values = values if isinstance(values, Tensor) else np.asarray(values)
        return torch.as_tensor(values).detach().cpu().reshape(-1)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be one number per row: {error}") from error


def _gradient(array: Array, party: str, key: str, labels: Tensor | None) -> Tensor:
    """Return an array as a gradient with finite entries and one label per row."""
    gradient = to_tensor(array)
    if not gradient.is_floating_point() or gradient.ndim == 0:
        raise ConfigError(
            f"'{key}' of type {array.dtype} and shape {tuple(array.shape)} is not a "
            "gradient with one row per example; name the gradients with arrays="
        )
    if labels is not None and len(labels) != len(gradient):
        both = f"{len(labels)} labels for {len(gradient)} rows of its gradient"
        remedy = "Give one per row; for mini-batches labels=lambda message: y[rows]"
        raise PartyError(party, f"there are {both}", remedy)
    remedy = "Look for the cause where the app computes it; it was not sent"
    check_finite(gradient, party, "its gradient", remedy, None)
    return gradient
