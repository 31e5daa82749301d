"""Rows of a run that are kept for pictures: gradients, embeddings, predictions.

The file holds labels too, so this works only where all parties are in one process.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.grids.wrapped import WrappedGrid
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.protocol.messages import GRADIENT as SENT_GRADIENT
from flower_vfl.protocol.messages import Verb, read, to_tensor
from flower_vfl.randomness import derive_seed
from flower_vfl.strategies import VerticalStrategy

from .config import RunConfig
from .parties import load_rows
from .results import write_whole

CAPTURE_FILE = "capture.npz"
# Names of the arrays in the file; those of one party are called ``name/party``.
GRADIENT, GRADIENT_STEP = "gradient", "gradient_step"
GRADIENT_LABEL, GRADIENT_PREDICTION = "gradient_label", "gradient_prediction"
EMBEDDING, LABEL, PREDICTION = "embedding", "label", "prediction"
PART = "part"  # of GAFM's gradient, of the last batch
TASK, CLASSES, PARTIES = "task", "classes", "parties"
_BRINGS_GRADIENT = (Verb.FORWARD, Verb.EMBED, Verb.CHECKPOINT, Verb.BACKWARD)

Arrays = dict[str, NDArray[Any]]


def check_capture(config: RunConfig, engine: str) -> None:
    """Raise an error before training if the run cannot keep rows."""
    if not config.capture:
        return
    if engine != "in-process":
        text = "capture stores labels with gradients, so it needs the engine in-process"
        raise ConfigError(f"{text}, not '{engine}'")
    if not config.out:
        raise ConfigError("capture needs an output folder; use --out")


class CapturingGrid(WrappedGrid):
    """A grid that keeps the newest full gradient of each party, and embeddings."""

    def __init__(self, grid: InProcessGrid) -> None:
        super().__init__(grid)
        self._parties = grid.parties
        self._names: dict[int, str] = {}  # of the nodes
        self._newest: dict[int, tuple[int, Tensor]] = {}  # step and gradient
        self._embedded: dict[str, list[Tensor]] | None = None

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies."""
        requests = list(messages)
        for message in requests:
            if message.metadata.message_type in _BRINGS_GRADIENT:
                self._note_gradient(message)
        replies = list(self._grid.send_and_receive(requests, timeout=timeout))
        for reply in replies:
            if not reply.has_error():
                self._note_reply(reply)
        return replies

    def _note_gradient(self, message: Message) -> None:
        content, node = read(message), message.metadata.dst_node_id
        if SENT_GRADIENT not in content.arrays:
            return
        gradient, party = to_tensor(content.arrays[SENT_GRADIENT]), self._passive(node)
        if party.codec is not None:
            at = party.shape, party.name, "its gradient", content.gradient_step
            gradient = party.codec.read(gradient, *at)
        if node not in self._newest or len(gradient) >= len(self._newest[node][1]):
            self._newest[node] = content.gradient_step, gradient

    def _note_reply(self, reply: Message) -> None:
        kind, node = reply.metadata.message_type, reply.metadata.src_node_id
        if kind == Verb.HELLO:
            self._names[node] = str(read(reply).config.get("name", ""))
        elif kind == Verb.EMBED and self._embedded is not None:
            party = self._passive(node)
            found = read(reply).tensors(party.encoder is not None)[party.name]
            if party.encoder is not None:
                at = party.shape, party.name, "its embedding", None
                found = party.encoder.codec.read(found, *at)
            self._embedded.setdefault(party.name, []).append(found.detach().cpu())

    def _passive(self, node: int) -> PassiveParty:
        party = self._parties()[self._names[node]]
        assert isinstance(party, PassiveParty)  # no other gets what is kept here
        return party

    def save(self, strategy: VerticalStrategy, config: RunConfig) -> None:
        """Write the kept rows of a trained run, whole or not at all."""
        label = next(p for p in self._parties().values() if isinstance(p, LabelParty))
        chosen = _Rows(label, config)
        arrays: Arrays = {
            TASK: np.asarray(label.objective.task),
            CLASSES: np.asarray(load_rows(config, 0).classes, dtype=np.str_),
            PARTIES: np.asarray(list(self._names.values()), dtype=np.str_),
        }
        arrays |= self._held_out(strategy, chosen)
        arrays |= self._gradients(strategy, chosen)
        parts: dict[str, Tensor] = getattr(label.objective, "gradient_parts", {})
        arrays |= {f"{PART}/{name}": _matrix(part) for name, part in parts.items()}
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        write_whole(Path(config.out) / CAPTURE_FILE, file.getvalue())

    def _held_out(self, strategy: VerticalStrategy, chosen: _Rows) -> Arrays:
        """Return embeddings and predictions of test rows, with their labels."""
        self._embedded = {}
        predictions = strategy.predict("test")  # asks for the embeddings first
        embedded, self._embedded = self._embedded, None
        if not len(predictions):
            return {}
        places, labels = chosen.pick(chosen.schedule.rows("test").cpu())
        arrays: Arrays = {LABEL: labels, PREDICTION: predictions[places]}
        for name, parts in embedded.items():
            arrays[f"{EMBEDDING}/{name}"] = _matrix(torch.cat(parts)[places])
        return arrays

    def _gradients(self, strategy: VerticalStrategy, chosen: _Rows) -> Arrays:
        """Return the newest gradient of each party, with labels and predictions."""
        arrays: Arrays = {}
        predictions = strategy.predict("train")
        training = chosen.schedule.rows("train").cpu()
        steps = chosen.schedule.batches("train", training=True)
        for node, (step, gradient) in self._newest.items():
            name, (epoch, index) = self._names[node], divmod(step - 1, steps)
            rows = chosen.schedule.training_batches(epoch + 1)[index].cpu()
            places, labels = chosen.pick(rows)
            at = torch.searchsorted(training, rows[places]).numpy()
            arrays |= {
                f"{GRADIENT}/{name}": _matrix(gradient[places]),
                f"{GRADIENT_STEP}/{name}": np.asarray(step),
                f"{GRADIENT_LABEL}/{name}": labels,
                f"{GRADIENT_PREDICTION}/{name}": predictions[at],
            }
        return arrays


class _Rows:
    """Chooses rows whose labels the label party knows."""

    def __init__(self, label: LabelParty, config: RunConfig) -> None:
        self.schedule = label.configured()
        self._label = label
        self._count = config.capture
        self._seed = derive_seed(config.seed, "capture")

    def pick(self, rows: Tensor) -> tuple[Tensor, NDArray[Any]]:
        """Return the places of some of the rows, in order, and their labels."""
        row_index, labels = self._label.row_index, self._label.raw_labels
        assert labels is not None  # the run was trained
        own = rows if row_index is None else row_index.local.cpu()[rows]
        known = np.flatnonzero((own >= 0).numpy())
        count = min(self._count, len(known))
        draw = np.random.default_rng(self._seed)
        places = torch.from_numpy(np.sort(draw.choice(known, count, replace=False)))
        return places, labels.cpu()[own[places]].numpy()


def parties(arrays: Arrays, what: str) -> list[str]:
    """Return the parties of which gradients or embeddings were kept."""
    return [str(name) for name in arrays[PARTIES] if f"{what}/{name}" in arrays]


def whole(arrays: Arrays) -> bool:
    """Return whether kept rows have all their parts, of equal length and finite."""
    if not {TASK, CLASSES, PARTIES} <= set(arrays):
        return False
    embedded = [f"{EMBEDDING}/{name}" for name in parties(arrays, EMBEDDING)]
    # Without test rows there are no labels of them either.
    together = [[LABEL, PREDICTION, *embedded]] if embedded or LABEL in arrays else []
    steps = []
    for name in parties(arrays, GRADIENT):
        steps.append(f"{GRADIENT_STEP}/{name}")
        parts = (GRADIENT, GRADIENT_LABEL, GRADIENT_PREDICTION)
        together.append([f"{part}/{name}" for part in parts])
    return set(steps) <= set(arrays) and all(
        set(names) <= set(arrays)
        and len({arrays[name].shape[:1] for name in names}) == 1
        and all(np.isfinite(arrays[name]).all() for name in names)
        for names in together
    )


def _matrix(rows: Tensor) -> NDArray[np.float32]:
    return rows.detach().float().cpu().reshape(len(rows), -1).numpy()
