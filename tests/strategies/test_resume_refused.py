"""Checkpoints that a run cannot go on from, and what the errors say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from resume_cases import CountingTransform, PowerCutError, cut_at, rich_grid, strategy
from torch import Tensor
from vertical_cases import HookedGrid

from flower_vfl import Batch, ConfigError, PartyError, PartyRestartedError
from flower_vfl.protocol import replay as sessions
from flower_vfl.protocol.messages import Verb


def test_without_checkpoints_a_lost_memory_ends_the_run(tmp_path: Path) -> None:
    grid = rich_grid(tmp_path)
    strategy(tmp_path, 1).start(grid, num_rounds=1)  # an earlier run's must not count

    def lose_memory(message: Message) -> None:
        if message.metadata.message_type == Verb.TRAIN_STEP.value:
            sessions.forget(grid.run.run_id)

    with pytest.raises(PartyRestartedError, match=r"'label'.*restarted") as caught:
        strategy(tmp_path, 0).start(HookedGrid(grid, lose_memory), num_rounds=1)
    assert "no checkpoint" in str(caught.value.__cause__)


def test_a_party_that_forgets_again_and_again_ends_the_run(tmp_path: Path) -> None:
    grid = rich_grid(tmp_path)

    def lose_memory(message: Message) -> None:
        if message.metadata.message_type == Verb.TRAIN_STEP.value:
            sessions.forget(grid.run.run_id)

    with pytest.raises(PartyRestartedError) as caught:
        strategy(tmp_path, 1).start(HookedGrid(grid, lose_memory), num_rounds=1)
    assert "step 1 was tried 4 times" in caught.value.__notes__


def test_resume_without_any_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with rich_grid(tmp_path) as grid, pytest.raises(ConfigError) as caught:
        strategy(tmp_path, 1).start(grid, resume=True)
    for word in ("every party", "state-dir", "Checkpoints(every="):
        assert word in str(caught.value)


def test_a_checkpoint_that_one_party_lacks_is_not_used(tmp_path: Path) -> None:
    with rich_grid(tmp_path) as grid:
        strategy(tmp_path, 2).start(grid, num_rounds=2)
    (tmp_path / "passive-1" / "step-6.pt").unlink()
    with rich_grid(tmp_path) as grid:
        training = strategy(tmp_path, 2).connect(grid, num_rounds=2)
        training.resume()
        assert training.state.step == 4
    (tmp_path / "passive-1" / "step-4.pt").unlink()
    with rich_grid(tmp_path) as grid, pytest.raises(ConfigError, match="every party"):
        strategy(tmp_path, 2).start(grid, num_rounds=2, resume=True)


def test_a_new_run_does_not_go_on_from_an_old_ones_checkpoint(tmp_path: Path) -> None:
    with rich_grid(tmp_path) as grid:
        strategy(tmp_path, 1).start(grid, num_rounds=3)
    with rich_grid(tmp_path) as grid, pytest.raises(PowerCutError):
        strategy(tmp_path, 4).start(cut_at(grid, Verb.TRAIN_STEP, 3), num_rounds=3)
    with rich_grid(tmp_path) as grid:
        training = strategy(tmp_path, 4).connect(grid, num_rounds=3)
        training.resume()
        assert training.state.step == 0


@pytest.mark.parametrize("change", [{"seed": 6}, {"batch_size": 12}])
def test_a_checkpoint_of_other_settings_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    with rich_grid(tmp_path) as grid:
        strategy(tmp_path, 1).start(grid, num_rounds=1)
    other = strategy(tmp_path, 1)
    for name, value in change.items():
        setattr(other, name, value)
    with (
        rich_grid(tmp_path) as grid,
        pytest.raises(ConfigError, match=f"{next(iter(change))} was .*, now"),
    ):
        other.start(grid, num_rounds=1, resume=True)


def test_other_transforms_than_those_of_the_checkpoint_are_refused(
    tmp_path: Path,
) -> None:
    with rich_grid(tmp_path) as grid:
        strategy(tmp_path, 1).start(grid, num_rounds=1)
    with (
        rich_grid(tmp_path) as grid,
        pytest.raises(
            ConfigError, match=r"defense was CountingTransform.*, now not set"
        ),
    ):
        strategy(tmp_path, 1, defense=[]).start(grid, resume=True)


@pytest.mark.parametrize(
    ("every", "note"),
    [(2, "newest checkpoint is of step 4: start with resume"), (0, "No checkpoint")],
)
def test_an_error_says_from_where_to_resume(
    every: int, note: str, tmp_path: Path
) -> None:
    class Broken(CountingTransform):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return gradient * float("nan" if batch.step == 6 else 1.0)

    with rich_grid(tmp_path) as grid, pytest.raises(PartyError) as caught:
        strategy(tmp_path, every, defense=[Broken()]).start(grid, num_rounds=4)
    assert note in caught.value.__notes__[0]
