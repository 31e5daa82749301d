"""Runs with checkpoints, and power cuts, for the tests of resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor
from vertical_cases import HookedGrid, rich_app

from flower_vfl import Batch, InProcessGrid
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import Checkpoints, Defense, EarlyStopping, VerticalStrategy

EPOCHS, STEPS = 4, 3  # 36 training rows in batches of 16, 16 and 4


class CountingTransform:
    """A transform with a state: what it adds depends on how often it was called."""

    requires_labels = False

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        return gradient + 1e-4 * self.calls

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def strategy(folder: Path | None, every: int, **options: Any) -> VerticalStrategy:
    return VerticalStrategy(
        batch_size=16,
        seed=options.pop("seed", 5),
        valid_fraction=0.2,
        early_stopping=EarlyStopping(patience=2, metric="loss"),
        progress=False,
        defense=Defense(options.pop("defense", [CountingTransform()]), noise_seed=2),
        checkpoints=Checkpoints(every=every, keep_final=True, folder=folder),
        **options,
    )


def rich_grid(folder: Path) -> InProcessGrid:
    return InProcessGrid(rich_app(), 3, {"state-dir": str(folder)})


class PowerCutError(Exception):
    """Ends a run where nobody expects it."""


def cut_at(grid: Grid, verb: Verb, count: int) -> HookedGrid:
    seen = {"count": 0}

    def before(message: Message) -> None:
        seen["count"] += message.metadata.message_type == verb.value
        if seen["count"] == count:
            raise PowerCutError

    return HookedGrid(grid, before)
