"""Gradients in messages, and a transform that keeps its batches, for grid tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import Tensor

from flower_vfl.transform import Batch

TYPE = "train.apply_gradients"


class Toy:
    """Keeps what it was called with and returns what `change` makes of it."""

    def __init__(
        self,
        change: Callable[[Tensor], Tensor | None] = lambda g: g + 1,
        requires_labels: bool = False,
    ) -> None:
        self.change, self.requires_labels = change, requires_labels
        self.batches: list[Batch] = []

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        self.batches.append(batch)
        batch.metrics["size"] = float(gradient.numel())
        return self.change(gradient)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def message(
    *gradients: np.ndarray | Tensor, node: int = 1, kind: str = TYPE, **more: Any
) -> Message:
    arrays = {f"g{i}": Array(np.asarray(g)) for i, g in enumerate(gradients)}
    return Message(RecordDict({"grads": ArrayRecord(arrays), **more}), node, kind)


def value(message: Message, key: str = "g0") -> np.ndarray:
    return message.content["grads"][key].numpy()


def rows(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)
