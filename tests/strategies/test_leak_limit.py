"""What happens where a leak limit is exceeded: a stop, or a stronger defense."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from covering import covering
from leak_cases import Record, deep_parties, flower_warnings, run
from records_cases import series_of
from strategy_cases import build_strategy
from vertical_cases import final_states, labels, losses, rich_app, scores

from flower_vfl import InProcessGrid, PartyError
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.checkpoints import DirectoryStore, step_tag
from flower_vfl.strategies import (
    EarlyStopping,
    Iso,
    VerticalResult,
    build_defense,
)

EPOCHS, STEPS = 4, 3  # of 48 rows in batches of 16


def strategy(folder: Path, leakage: Leakage | None, **settings: Any) -> Any:
    return build_strategy(
        **{
            "batch_size": 16,
            "seed": 3,
            "noise_seed": 5,
            "leakage": leakage,
            "keep_final": True,
            "state_dir": folder,
            "progress": False,
            **settings,
        }
    )


def start(
    folder: Path,
    leakage: Leakage | None,
    resume: bool = False,
    record: Record | None = None,
    epochs: int = EPOCHS,
    **settings: Any,
) -> VerticalResult:
    app = rich_app(build_defense=build_defense)
    with InProcessGrid(app, 3, {"state-dir": str(folder)}) as inner:
        grid = inner if record is None else record.grid(inner)
        made = strategy(folder, leakage, **settings)
        result: VerticalResult = made.start(grid, num_rounds=epochs, resume=resume)
        return result


def stopping(window: int) -> Leakage:
    return Leakage(("mean",), limit=0.55, action="stop", window=window)


def measured(result: VerticalResult) -> dict[str, Any]:
    """Return all series but those of the limit."""
    return {
        k: v for k, v in series_of(result).items() if not k.startswith("leak_limit")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> VerticalResult:
    return start(tmp_path_factory.mktemp("whole"), Leakage(("mean",)))


@pytest.mark.parametrize(  # within, at the end of, after an epoch
    ("window", "every"), covering([2, 3, 4], [0, 1, 4], strength=1)
)
def test_a_stopped_run_is_kept_and_goes_on(
    window: int, every: int, undisturbed: VerticalResult, tmp_path: Path
) -> None:
    settings = {"checkpoint_every": every}
    record = Record()
    stopped = start(tmp_path, stopping(window), record=record, **settings)
    parties = "passive-1, passive-2"
    assert stopped.stopped == f"the leak limit was exceeded for {parties}"
    for party in ("passive-1", "passive-2"):
        assert series_of(stopped)[f"leak_limit/{party}"]["steps"] == [window]
        assert series_of(stopped)[f"leak_mean/{party}"]["steps"] == [
            *range(1, window + 1)
        ]
    for name in ("label", "passive-1", "passive-2", "strategy"):
        assert step_tag(window) in DirectoryStore(tmp_path / name).tags()
    ends = {state["step"] for state in final_states(tmp_path).values()}
    assert ends == {window}

    last, steps = divmod(window - 1, STEPS)
    train = stopped.train_metrics_clientapp
    assert list(train) == list(range(1, last + 2))
    assert train[last + 1]["steps"] == steps + 1
    replies = [r.metrics["loss"] for r in record.label_replies()][-steps - 1 :]
    assert train[last + 1]["loss"] == pytest.approx(sum(replies) / len(replies))
    assert list(stopped.evaluate_metrics_clientapp) == list(train)
    assert "test_auc" in stopped.evaluate_metrics_clientapp[last + 1]

    resumed = start(tmp_path, Leakage(("mean",)), resume=True, **settings)
    assert resumed.stopped == ""
    assert losses(resumed) == losses(undisturbed)
    assert measured(resumed) == measured(undisturbed)
    expected = scores(undisturbed)
    assert {epoch: scores(resumed)[epoch] for epoch in expected} == expected
    steps_by_epoch = {m["steps"] for m in resumed.train_metrics_clientapp.values()}
    assert steps_by_epoch == {STEPS}


def test_a_run_that_goes_on_with_the_limit_stops_after_another_window(
    tmp_path: Path,
) -> None:
    start(tmp_path, stopping(2))
    again = start(tmp_path, stopping(2), resume=True)
    assert series_of(again)["leak_limit/passive-1"]["steps"] == [2, 4]
    assert again.stopped


def test_a_limit_that_is_not_exceeded_stops_nothing(tmp_path: Path) -> None:
    leakage = Leakage(("mean",), limit=1.0, action="stop", window=1)
    result = start(tmp_path, leakage, epochs=1)
    assert result.stopped == ""
    assert result.train_metrics_clientapp[1]["steps"] == STEPS


def test_a_stop_says_from_where_to_resume(tmp_path: Path) -> None:
    with flower_warnings() as told:
        start(tmp_path, stopping(2))
    assert any(
        "stopped: the leak limit" in line and "newest checkpoint is of step 2" in line
        for line in told
    )


def test_a_stop_beside_early_stopping_restores_the_best(tmp_path: Path) -> None:
    early = EarlyStopping(patience=9, restore_best=True)
    settings = {"early_stopping": early, "valid_fraction": 0.2, "batch_size": 12}
    result = start(tmp_path, stopping(5), **settings)
    assert "leak limit" in result.stopped
    best = max(
        result.evaluate_metrics_clientapp.items(), key=lambda e: e[1]["valid_auc"]
    )
    states = final_states(tmp_path)
    assert {state["step"] for state in states.values()} == {3 if best[0] == 1 else 5}


@pytest.mark.parametrize("evaluate_every", [0, 3])
def test_the_last_evaluation_of_a_stopped_run(
    evaluate_every: int, tmp_path: Path
) -> None:
    result = start(tmp_path, stopping(4), evaluate_every=evaluate_every)
    found = list(result.evaluate_metrics_clientapp)
    assert found == ([2] if evaluate_every else [])


def raising(factor: float = 3.0) -> Leakage:
    return Leakage(("mean",), limit=0.6, action="raise", window=2, factor=factor)


def raised(folder: Path, placement: str, tag: str = "final") -> float:
    """Return what a checkpoint says about the strength of the first defense."""
    name, key = {"strategy": ("strategy", "defender"), "label": ("label", "defense")}[
        placement
    ]
    state = DirectoryStore(folder / name).load(tag)[key]["transforms"][0]
    return float(state["raised"])


@pytest.mark.parametrize("placement", ["strategy", "label"])
def test_a_stronger_defense_survives_a_restart(placement: str, tmp_path: Path) -> None:
    settings = {"transforms": "iso:t=0.001", "placement": placement}
    whole = start(tmp_path / "whole", raising(), **settings)
    times = len(series_of(whole)["leak_limit/passive-1"]["steps"])
    assert times >= 3
    assert raised(tmp_path / "whole", placement) == pytest.approx(3.0**times)

    parts = tmp_path / "parts"
    start(parts, raising(), epochs=2, checkpoint_every=3, **settings)
    before = raised(parts, placement)
    assert 1.0 < before < 3.0**times
    end = start(parts, raising(), resume=True, checkpoint_every=3, **settings)
    assert series_of(end) == series_of(whole)
    assert losses(end) == losses(whole)
    assert raised(parts, placement) == pytest.approx(3.0**times)


def test_both_places_raise_alike_and_say_so(tmp_path: Path) -> None:
    results = []
    for placement in ("strategy", "label"):
        settings = {"transforms": "iso:t=0.001", "placement": placement}
        with flower_warnings() as told:
            results.append(start(tmp_path / placement, raising(), **settings))
        news = [line for line in told if line.startswith("from the next step on")]
        assert news[:2] == [
            "from the next step on: Iso is now 3 times as strong as its setting",
            "from the next step on: Iso is now 9 times as strong as its setting",
        ]
    assert series_of(results[0]) == series_of(results[1])


def test_leakage_falls_to_the_limit() -> None:
    """From nearly everything to what the limit allows, in a few windows."""
    parties = deep_parties(labels(600))
    leakage = Leakage(
        ("mean:held_out=true",), limit=0.7, action="raise", window=5, factor=4.0
    )
    result = run(leakage, "iso:t=0.01", epochs=6, parties=parties)
    for party in ("passive-1", "passive-2"):
        values = series_of(result)[f"leak_mean:held_out=true/{party}"]["values"]
        assert sum(values[:5]) / 5 > 0.9
        # Six windows later; five steps of 16 rows alone may exceed it by chance.
        assert max(sum(values[i : i + 30]) / 30 for i in (30, 90, 150)) < 0.7
        steps = series_of(result)[f"leak_limit/{party}"]["steps"]
        assert all(later - earlier >= 5 for earlier, later in pairwise(steps))


def test_no_noise_is_added_before_the_next_step() -> None:
    """The gradient that exceeds the limit has left already."""
    parties = deep_parties(labels(600))
    iso, settings = Iso(1e-6), {"batch_size": 64}
    result = run(raising(1e8), [iso], epochs=1, parties=parties, settings=settings)
    assert series_of(result)["leak_limit/passive-1"]["steps"][0] == 2
    values = series_of(result)["leak_mean/passive-1"]["values"]
    assert min(values[:2]) > 0.9 > values[2]


@pytest.mark.parametrize("transforms", ["", "max-norm", "gc | max-norm", "@2 none"])
def test_a_defense_without_a_strength_cannot_be_raised(transforms: str) -> None:
    with pytest.raises((ConfigError, PartyError), match="needs a defense that has a"):
        run(raising(), transforms)
    with pytest.raises(PartyError, match="iso, noisy-gradients or marvell"):
        run(raising(), transforms, "label")


@pytest.mark.parametrize(
    "transforms",
    ["iso", "ng", "marvell", "gc | iso", "passive-1=iso; *=none", "@2 marvell:s=4"],
)
def test_one_with_a_strength_somewhere_can(transforms: str) -> None:
    run(raising(), transforms, epochs=1)
    run(raising(), transforms, "label", epochs=1)


def test_the_label_partys_own_defense_can_be_raised() -> None:
    own = Iso(1e-4)
    run(raising(), defense=own)
    assert own.raised > 1.0
