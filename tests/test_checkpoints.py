"""How checkpoints are kept, and that a run goes on from them as if undisturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor
from vertical_cases import (
    WrappedGrid,
    assert_equal,
    final_states,
    losses,
    rich_app,
    scores,
)

from flower_vfl import (
    Batch,
    ConfigError,
    InProcessGrid,
    PartyError,
    PartyRestartedError,
    sessions,
)
from flower_vfl.checkpoints import DirectoryStore, RecordStore, Store, open_store
from flower_vfl.protocol import Verb, read
from flower_vfl.strategies import EarlyStopping, VerticalStrategy

EPOCHS, STEPS = 4, 3  # 36 training rows in batches of 16, 16 and 4


@pytest.fixture(params=["directory", "record"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "party")
    return RecordStore(RecordDict())


def test_a_store_returns_what_was_saved(store: Store) -> None:
    assert store.tags() == []
    state = {"weights": torch.randn(3), "step": 4, "list": [1, 2.5, "x"]}
    store.save("best", state)
    assert_equal(store.load("best"), state)
    store.save("best", {"step": 5})
    assert store.load("best") == {"step": 5}


def test_two_step_checkpoints_are_kept_and_all_others(store: Store) -> None:
    store.save("best", {})
    for step in (8, 9, 10, 11):
        store.save(f"step-{step}", {"step": step})
    store.save("final", {})
    assert set(store.tags()) == {"best", "final", "step-10", "step-11"}


def test_checkpoints_of_a_run_that_was_given_up_are_dropped(store: Store) -> None:
    store.save("step-90", {"run": 1})
    store.save("step-100", {"run": 1})
    store.save("step-10", {"run": 2})
    assert store.tags() == ["step-10"]


@pytest.mark.parametrize(
    "tag", ["", "../x", "a/b", ".hidden", "Best", "a b", "x" * 65, "-x", "a\n"]
)
def test_unsafe_tags_are_refused(store: Store, tag: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a checkpoint"):
        store.save(tag, {})
    with pytest.raises(ConfigError):
        store.load(tag)


def test_a_missing_tag_lists_those_that_are_there(store: Store) -> None:
    store.save("best", {})
    with pytest.raises(ConfigError, match=r"no checkpoint 'final'.*'best'"):
        store.load("final")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_checkpoint(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.save("best", {"step": 1})

    def crash(*args: object) -> None:
        raise OSError("disk full")

    owner: object = os if moment == "fsync" else Path
    monkeypatch.setattr(owner, moment, crash)
    with pytest.raises(OSError, match="disk full"):
        store.save("best", {"step": 2})
    monkeypatch.undo()
    assert store.load("best") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.system, ("true",)

    store = DirectoryStore(tmp_path)
    store.save("best", {"evil": Evil()})
    with pytest.raises(Exception, match="Weights only"):
        store.load("best")


def test_names_that_look_alike_as_folders_stay_apart(tmp_path: Path) -> None:
    context = Context(1, 1, {"state-dir": str(tmp_path)}, RecordDict(), {})
    names = ["shop 1", "shop_1", "shop/1", "../shop", "..", "läden", "l_den"]
    folders = []
    for name in names:
        store = open_store(context, name)
        assert isinstance(store, DirectoryStore)
        assert store.folder.resolve().parent == tmp_path.resolve()
        folders.append(store.folder.resolve())
    assert len(set(folders)) == len(names)


def test_the_nodes_own_folder_comes_before_that_of_the_run(tmp_path: Path) -> None:
    run = {"state-dir": str(tmp_path / "run")}
    own = Context(1, 1, {"state-dir": str(tmp_path / "own")}, RecordDict(), run)
    assert open_store(own, "a").folder == tmp_path / "own" / "a"  # type: ignore[attr-defined]
    shared = Context(1, 1, {}, RecordDict(), run)
    assert open_store(shared, "a").folder == tmp_path / "run" / "a"  # type: ignore[attr-defined]


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
        transforms=options.pop("transforms", [CountingTransform()]),
        early_stopping=EarlyStopping(patience=2, metric="loss"),
        keep_final=True,
        checkpoint_every=every,
        state_dir=folder,
        progress=False,
        **options,
    )


def rich_grid(folder: Path) -> InProcessGrid:
    return InProcessGrid(rich_app(), 3, {"state-dir": str(folder)})


def outcome(folder: Path, result: Any) -> list[object]:
    return [final_states(folder), losses(result), scores(result)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with rich_grid(folder) as grid:
        result = strategy(folder, 0).start(grid, num_rounds=EPOCHS)
    assert len(losses(result)) == EPOCHS
    return outcome(folder, result)


class PowerCutError(Exception):
    """Ends a run where nobody expects it."""


def cut_at(grid: Grid, verb: Verb, count: int) -> WrappedGrid:
    seen = {"count": 0}

    def before(message: Message) -> None:
        seen["count"] += message.metadata.message_type == verb.value
        if seen["count"] == count:
            raise PowerCutError

    return WrappedGrid(grid, before)


@pytest.mark.parametrize(
    ("verb", "count", "every"),
    [
        pytest.param(Verb.LABEL, 6, 1, id="mid-epoch"),
        pytest.param(Verb.LABEL, 9, 2, id="some steps after a checkpoint"),
        pytest.param(Verb.LABEL, 7, STEPS, id="epoch end"),
        pytest.param(Verb.LABEL, 2, 4, id="before the first"),
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
                cut_at(grid, Verb.LABEL, count), num_rounds=EPOCHS, resume=count == 5
            )
    with rich_grid(tmp_path) as grid:
        result = strategy(tmp_path, 2).start(grid, num_rounds=EPOCHS, resume=True)
        assert_equal(outcome(tmp_path, result), undisturbed)


def test_without_a_folder_of_the_strategy_weights_are_resumed(
    undisturbed: list[object], tmp_path: Path
) -> None:
    with rich_grid(tmp_path) as grid, pytest.raises(PowerCutError):
        strategy(None, 1, transforms=[]).start(
            cut_at(grid, Verb.LABEL, 6), num_rounds=EPOCHS
        )
    with rich_grid(tmp_path) as grid:
        result = strategy(None, 1, transforms=[]).start(
            grid, num_rounds=EPOCHS, resume=True
        )
    assert list(losses(result)) == [2, 3, 4]


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
            cut_at(grid, Verb.LABEL, (stopped_at - 1) * STEPS + 2), num_rounds=20
        )
    with rich_grid(cut) as grid:
        result = eager(cut).start(grid, num_rounds=20, resume=True)
    assert_equal(outcome(cut, result), expected)


@pytest.mark.parametrize("party", ["label", "passive-2"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_party_that_loses_its_memory_is_rewound(
    party: str, on_disk: bool, undisturbed: list[object], tmp_path: Path
) -> None:
    run_config = {"state-dir": str(tmp_path)} if on_disk else None
    grid = InProcessGrid(rich_app(), 3, run_config)
    seen = {"labels": 0}

    def lose_memory(message: Message) -> None:
        seen["labels"] += message.metadata.message_type == Verb.LABEL.value
        if seen["labels"] == 8:
            seen["labels"] += 1
            found = next(
                key
                for key, s in sessions._sessions.items()
                if s.party.name == party and key[0] == grid.run.run_id
            )
            del sessions._sessions[found]

    wrapped = WrappedGrid(grid, lose_memory)
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

    wrapped = WrappedGrid(grid, lose_memory)
    result = strategy(tmp_path, 2).start(wrapped, num_rounds=EPOCHS)
    assert seen["lost"] == 1
    assert_equal(outcome(tmp_path, result), undisturbed)


def test_without_checkpoints_a_lost_memory_ends_the_run(tmp_path: Path) -> None:
    grid = rich_grid(tmp_path)
    strategy(tmp_path, 1).start(grid, num_rounds=1)  # an earlier run's must not count

    def lose_memory(message: Message) -> None:
        if message.metadata.message_type == Verb.LABEL.value:
            sessions.forget(grid.run.run_id)

    with pytest.raises(PartyRestartedError, match=r"'label'.*restarted") as caught:
        strategy(tmp_path, 0).start(WrappedGrid(grid, lose_memory), num_rounds=1)
    assert "no checkpoint" in str(caught.value.__cause__)


def test_a_party_that_forgets_again_and_again_ends_the_run(tmp_path: Path) -> None:
    grid = rich_grid(tmp_path)

    def lose_memory(message: Message) -> None:
        if message.metadata.message_type == Verb.LABEL.value:
            sessions.forget(grid.run.run_id)

    with pytest.raises(PartyRestartedError) as caught:
        strategy(tmp_path, 1).start(WrappedGrid(grid, lose_memory), num_rounds=1)
    assert "step 1 was tried 4 times" in caught.value.__notes__


def test_resume_without_any_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with rich_grid(tmp_path) as grid, pytest.raises(ConfigError) as caught:
        strategy(tmp_path, 1).start(grid, resume=True)
    for word in ("every party", "state-dir", "checkpoint_every"):
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
        strategy(tmp_path, 4).start(cut_at(grid, Verb.LABEL, 3), num_rounds=3)
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
        pytest.raises(PartyError, match=f"{next(iter(change))}.*settings"),
    ):
        other.start(grid, num_rounds=1, resume=True)


def test_other_transforms_than_those_of_the_checkpoint_are_refused(
    tmp_path: Path,
) -> None:
    with rich_grid(tmp_path) as grid:
        strategy(tmp_path, 1).start(grid, num_rounds=1)
    with rich_grid(tmp_path) as grid, pytest.raises(ConfigError, match="transforms"):
        strategy(tmp_path, 1, transforms=[]).start(grid, resume=True)


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
        strategy(tmp_path, every, transforms=[Broken()]).start(grid, num_rounds=4)
    assert note in caught.value.__notes__[0]


def test_ctrl_c_ends_after_a_checkpoint_and_can_be_resumed(
    undisturbed: list[object], tmp_path: Path
) -> None:
    class Impatient(CountingTransform):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            if batch.step == 5 and batch.party == "passive-1":
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(gradient, batch)

    before = signal.getsignal(signal.SIGINT)
    with rich_grid(tmp_path) as grid, pytest.raises(KeyboardInterrupt):
        strategy(tmp_path, 0, transforms=[Impatient()]).start(grid, num_rounds=EPOCHS)
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
        strategy(tmp_path, 0, transforms=[Hanging()]).start(grid, num_rounds=EPOCHS)
    assert not DirectoryStore(tmp_path / "label").tags()


def test_what_the_strategy_keeps_in_memory_does_not_grow(tmp_path: Path) -> None:
    made = strategy(tmp_path, 1)
    with rich_grid(tmp_path) as grid:
        made.start(grid, num_rounds=EPOCHS)
    assert len(made._running()._keeper.kept) <= 4  # two steps, best and final
