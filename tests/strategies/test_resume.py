"""A run goes on from its checkpoints as if nothing had disturbed it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from resume_cases import (
    EPOCHS,
    STEPS,
    CountingTransform,
    PowerCutError,
    cut_at,
    rich_grid,
    strategy,
)
from torch import Tensor
from vertical_cases import (
    HookedGrid,
    assert_equal,
    final_states,
    losses,
    rich_app,
    scores,
)

from flower_vfl import Batch, ConfigError, InProcessGrid
from flower_vfl.parties.checkpoints import DirectoryStore, RecordStore
from flower_vfl.protocol import replay as sessions
from flower_vfl.protocol.messages import Verb, read
from flower_vfl.strategies import EarlyStopping, VerticalStrategy


def outcome(folder: Path, result: Any) -> list[object]:
    return [final_states(folder), losses(result), scores(result)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with rich_grid(folder) as grid:
        result = strategy(folder, 0).start(grid, num_rounds=EPOCHS)
    assert len(losses(result)) == EPOCHS
    return outcome(folder, result)


@pytest.mark.parametrize(
    ("verb", "count", "every"),
    [
        pytest.param(Verb.TRAIN_STEP, 6, 1, id="mid-epoch"),
        pytest.param(Verb.TRAIN_STEP, 9, 2, id="some steps after a checkpoint"),
        pytest.param(Verb.TRAIN_STEP, 7, STEPS, id="epoch end"),
        pytest.param(Verb.TRAIN_STEP, 2, 4, id="before the first"),
        pytest.param(Verb.EVALUATE, 3, 1, id="while evaluating"),
        pytest.param(Verb.CHECKPOINT, 9, 1, id="while some parties keep one"),
        pytest.param(Verb.FORWARD, 11, 2, id="one party ahead of the other"),
    ],
)
def test_a_resumed_run_ends_as_the_undisturbed_one(
    verb: Verb, count: int, every: int, undisturbed: list[object], tmp_path: Path
) -> None:
    with rich_grid(tmp_path) as grid, pytest.raises(PowerCutError):
        strategy(tmp_path, every).start(cut_at(grid, verb, count), num_rounds=EPOCHS)
    with rich_grid(tmp_path) as grid:  # other processes, another run id
        result = strategy(tmp_path, every).start(grid, num_rounds=EPOCHS, resume=True)
        assert_equal(outcome(tmp_path, result), undisturbed)


def test_a_run_can_be_resumed_twice(undisturbed: list[object], tmp_path: Path) -> None:
    for count in (4, 5):
        with rich_grid(tmp_path) as grid, pytest.raises(PowerCutError):
            strategy(tmp_path, 2).start(
                cut_at(grid, Verb.TRAIN_STEP, count),
                num_rounds=EPOCHS,
                resume=count == 5,
            )
    with rich_grid(tmp_path) as grid:
        result = strategy(tmp_path, 2).start(grid, num_rounds=EPOCHS, resume=True)
        assert_equal(outcome(tmp_path, result), undisturbed)


def test_without_a_folder_of_the_strategy_nothing_is_resumed(tmp_path: Path) -> None:
    """Its history, its noise and what early stopping knows would be lost."""
    with rich_grid(tmp_path) as grid, pytest.raises(PowerCutError):
        strategy(None, 1).start(cut_at(grid, Verb.TRAIN_STEP, 6), num_rounds=EPOCHS)
    with rich_grid(tmp_path) as grid, pytest.raises(ConfigError, match="folder="):
        strategy(None, 1).start(grid, num_rounds=EPOCHS, resume=True)


def test_the_end_of_an_early_stopped_run_survives_a_power_cut(tmp_path: Path) -> None:
    """Best value, patience and the best epoch's weights are part of a checkpoint."""

    def eager(folder: Path) -> VerticalStrategy:
        made = strategy(folder, 1, learning_rate=0.3)
        made.early_stopping = EarlyStopping(patience=1, metric="accuracy")
        return made

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with rich_grid(whole) as grid:
        expected = outcome(whole, eager(whole).start(grid, num_rounds=20))
    stopped_at = max(expected[1])  # type: ignore[call-overload]
    assert 2 <= stopped_at < 20
    with rich_grid(cut) as grid, pytest.raises(PowerCutError):
        eager(cut).start(
            cut_at(grid, Verb.TRAIN_STEP, (stopped_at - 1) * STEPS + 2), num_rounds=20
        )
    with rich_grid(cut) as grid:
        result = eager(cut).start(grid, num_rounds=20, resume=True)
    assert_equal(outcome(cut, result), expected)


@pytest.mark.parametrize(
    ("party", "on_disk"), [("label", True), ("passive-2", False), ("label", False)]
)
def test_a_party_that_loses_its_memory_is_rewound(
    party: str, on_disk: bool, undisturbed: list[object], tmp_path: Path
) -> None:
    run_config = {"state-dir": str(tmp_path)} if on_disk else None
    grid = InProcessGrid(rich_app(), 3, run_config)
    seen = {"labels": 0}

    def lose_memory(message: Message) -> None:
        seen["labels"] += message.metadata.message_type == Verb.TRAIN_STEP.value
        if seen["labels"] == 8:
            seen["labels"] += 1
            found = next(
                key
                for key, s in sessions.sessions.items()
                if s.party.name == party and key[0] == grid.run.run_id
            )
            del sessions.sessions[found]

    wrapped = HookedGrid(grid, lose_memory)
    result = strategy(None, 3).start(wrapped, num_rounds=EPOCHS)
    assert seen["labels"] > EPOCHS * STEPS + 1  # steps were repeated
    if on_disk:
        final = final_states(tmp_path)
    else:
        states = [context.state for context in grid._contexts.values()]
        final = {
            name: RecordStore(state).load("final")
            for name, state in zip(undisturbed[0], states, strict=True)  # type: ignore[call-overload]
        }
    assert_equal([final, losses(result), scores(result)], undisturbed)


def test_a_party_that_loses_its_memory_at_the_very_end_is_rewound(
    undisturbed: list[object], tmp_path: Path
) -> None:
    grid = rich_grid(tmp_path)
    seen = {"lost": 0}

    def lose_memory(message: Message) -> None:
        if read(message).config.get("tag") == "final" and not seen["lost"]:
            seen["lost"] += 1
            sessions.forget(grid.run.run_id)

    wrapped = HookedGrid(grid, lose_memory)
    result = strategy(tmp_path, 2).start(wrapped, num_rounds=EPOCHS)
    assert seen["lost"] == 1
    assert_equal(outcome(tmp_path, result), undisturbed)


def test_ctrl_c_ends_after_a_checkpoint_and_can_be_resumed(
    undisturbed: list[object], tmp_path: Path
) -> None:
    class Impatient(CountingTransform):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            if batch.step == 5 and batch.party == "passive-1":
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(gradient, batch)

    Impatient.__name__ = CountingTransform.__name__  # the resumed run has that one
    before = signal.getsignal(signal.SIGINT)
    with rich_grid(tmp_path) as grid, pytest.raises(KeyboardInterrupt):
        strategy(tmp_path, 0, defense=[Impatient()]).start(grid, num_rounds=EPOCHS)
    assert signal.getsignal(signal.SIGINT) is before
    assert "step-5" in DirectoryStore(tmp_path / "label").tags()
    with rich_grid(tmp_path) as grid:
        result = strategy(tmp_path, 0).start(grid, num_rounds=EPOCHS, resume=True)
        assert_equal(outcome(tmp_path, result), undisturbed)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    class Hanging(CountingTransform):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("still here")

    with rich_grid(tmp_path) as grid, pytest.raises(KeyboardInterrupt):
        strategy(tmp_path, 0, defense=[Hanging()]).start(grid, num_rounds=EPOCHS)
    assert not DirectoryStore(tmp_path / "label").tags()


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_is_kept_does_not_grow(on_disk: bool, tmp_path: Path) -> None:
    """Two steps and the one before at a party, the best that they refer to, final."""
    made = strategy(tmp_path if on_disk else None, 1)
    with rich_grid(tmp_path) as grid:
        made.start(grid, num_rounds=EPOCHS)
    kept = made._running()._checkpoints._store.tags()
    assert {"final", "step-11", "step-12"} <= set(kept)
    assert len(kept) <= 5
    for party in ("label", "passive-1", "passive-2"):
        assert set(DirectoryStore(tmp_path / party).tags()) - set(kept) <= {"step-10"}


def test_what_the_user_measured_is_kept(tmp_path: Path) -> None:
    def measure(epoch: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"square": float(epoch * epoch)})

    for epochs in (1, 2):
        with rich_grid(tmp_path) as grid:
            made = strategy(tmp_path, STEPS)
            given = {"evaluate_fn": measure, "resume": epochs == 2}
            result = made.start(grid, num_rounds=epochs, **given)  # type: ignore[arg-type]
    found = result.evaluate_metrics_serverapp
    assert {epoch: dict(record) for epoch, record in found.items()} == {
        1: {"square": 1.0},
        2: {"square": 4.0},
    }
