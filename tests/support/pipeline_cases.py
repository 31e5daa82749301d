"""Runs with several batches under way, for several tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from resume_cases import CountingTransform
from vertical_cases import (
    PushedGrid,
    StatelessGrid,
    final_states,
    losses,
    rich_app,
    scores,
)

from flower_vfl import (
    InProcessGrid,
    ResidentGrid,
    resident,
)
from flower_vfl.strategies import (
    Checkpoints,
    Defense,
    VerticalStrategy,
)

EPOCHS, STEPS, SEED = 2, 6, 5  # 36 training rows in batches of 6


def strategy(folder: Path | None = None, pipeline: int = 2, **options: Any) -> Any:
    given = {
        "batch_size": 6,
        "seed": SEED,
        "valid_fraction": 0.2,
        "progress": False,
        "defense": Defense([CountingTransform()], noise_seed=2),
        "checkpoints": Checkpoints(every=4, keep_final=True, folder=folder),
    }
    return VerticalStrategy(pipeline=pipeline, **{**given, **options})


def rich(folder: Path, app: Any = None) -> InProcessGrid:
    return InProcessGrid(app or rich_app(), 3, {"state-dir": str(folder)})


def outcome(folder: Path, result: Any) -> list[object]:
    return [final_states(folder), losses(result), scores(result)]


def run(
    folder: Path, grid: Grid, pipeline: int = 2, resume: bool = False, **options: Any
) -> list[object]:
    made = strategy(folder, pipeline, **options)
    result = made.start(grid, num_rounds=EPOCHS, resume=resume)
    return outcome(folder, result)


class OneByOne(PushedGrid):
    """Replies arrive one at a time, the newest first."""

    def receive(self, message_ids: Iterable[str], timeout: float) -> Iterable[Message]:
        for name in reversed(list(message_ids)):
            if found := list(self.pull_messages([name])):
                return found
        return []


def stateless(folder: Path) -> StatelessGrid:
    return StatelessGrid(rich_app(), 3, {"state-dir": str(folder)})


def in_sessions(folder: Path) -> ResidentGrid:
    return ResidentGrid(rich(folder, resident(rich_app())))
