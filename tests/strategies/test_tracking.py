"""TensorBoard and MLflow are told what a run measures."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from records_cases import series_of
from vertical_cases import simple_parties

from flower_vfl import in_process
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.strategies import VerticalResult, VerticalStrategy
from flower_vfl.strategies.tracking import Mlflow, TensorBoard, build_tracker

EPOCHS = 3


@pytest.fixture(autouse=True)
def _a_folder_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # MLflow wants a database, whose driver its small package does not bring.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def run(*trackers: Any) -> VerticalResult:
    label, passive = simple_parties()
    strategy = VerticalStrategy(
        batch_size=32,
        valid_fraction=0.2,
        leakage=Leakage(("norm",)),
        trackers=trackers,
        progress=False,
    )
    return strategy.start(in_process([label, *passive]), num_rounds=EPOCHS)


def test_tensorboard_has_every_step_and_epoch(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing")
    del events
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(TensorBoard(str(tmp_path)))
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    series = series_of(result)["leak_norm/passive-1"]
    written = board.Scalars("step/leak_norm/passive-1")
    assert [event.step for event in written] == series["steps"]
    assert [event.value for event in written] == pytest.approx(series["values"])
    accuracy = board.Scalars("epoch/test_accuracy")
    assert [event.step for event in accuracy] == [1, 2, 3]
    assert [event.value for event in accuracy] == pytest.approx(
        [result.evaluate_metrics_clientapp[e]["test_accuracy"] for e in (1, 2, 3)]
    )
    assert [event.value for event in board.Scalars("epoch/loss")] == pytest.approx(
        [result.train_metrics_clientapp[e]["loss"] for e in (1, 2, 3)]
    )
    (text,) = board.Tensors("settings/text_summary")
    assert b"batch_size" in text.tensor_proto.string_val[0]


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(str(tmp_path))
    first.begin({}, 0)
    for step in (1, 2, 3):
        first.step(step, {"loss": 10.0 + step})
    first.end("")
    second = TensorBoard(str(tmp_path))
    second.begin({}, 2)
    second.step(3, {"loss": 30.0})
    second.end("")
    board = EventAccumulator(str(tmp_path), purge_orphaned_data=True)
    board.Reload()
    values = {event.step: event.value for event in board.Scalars("step/loss")}
    assert values == {1: 11.0, 2: 12.0, 3: 30.0}


def test_mlflow_has_every_step_epoch_and_setting(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"file://{tmp_path / 'mlruns'}"
    tracker = Mlflow(uri, experiment="leaks", name="one")
    result = run(tracker)
    client = tracking.MlflowClient(uri)
    experiment = client.get_experiment_by_name("leaks")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "one"
    assert found.data.params["batch_size"] == "32"
    history = client.get_metric_history(found.info.run_id, "leak_norm/passive-1")
    series = series_of(result)["leak_norm/passive-1"]
    assert sorted((m.step, m.value) for m in history) == list(
        zip(series["steps"], series["values"], strict=True)
    )
    last = result.evaluate_metrics_clientapp[EPOCHS]["test_accuracy"]
    assert found.data.metrics["epoch/test_accuracy"] == pytest.approx(last)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "no defense"),
        ({"seed": 3, "defense": "marvell:s=4"}, "marvell:s=4, seed 3"),
        (
            {"dataset": "spambase", "objective": "auto", "defense": "none", "seed": 0},
            "spambase, no defense, seed 0",
        ),
        (
            {"dataset": "x", "label-party": "data/bank.csv", "objective": "gafm"}
            | {"defense": "iso:t=4", "seed": 1},
            "bank, gafm + iso:t=4, seed 1",
        ),
    ],
)
def test_mlflow_runs_have_telling_names(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"file://{tmp_path / 'mlruns'}"
    tracker = Mlflow(uri)
    tracker.begin(settings, 0)
    tracker.end("")
    run = tracking.MlflowClient(uri).get_run(tracker.run_id)
    assert run.info.run_name == name


def test_names_that_mlflow_does_not_take(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"file://{tmp_path / 'mlruns'}"
    tracker = Mlflow(uri)
    tracker.begin({}, 0)
    tracker.step(1, {"leak_norm@0/a+b": 0.5, "loss": float("nan")})
    tracker.end("a leak")
    run = tracking.MlflowClient(uri).get_run(tracker.run_id)
    assert run.data.metrics == {"leak_norm-0/a-b": 0.5}
    assert run.data.tags["stopped"] == "a leak"


class Broken:
    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        self.told = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told += 1
        raise OSError("no space left")

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        raise AssertionError("told after it failed")

    def end(self, reason: str) -> None:
        raise AssertionError("told after it failed")


def test_a_tracker_that_fails_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("flwr").addHandler(caplog.handler)
    broken = Broken()
    try:
        result = run(broken)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert broken.told == 1
    assert "Broken failed and receives no more metrics: no space left" in caplog.text
    assert len(result.train_metrics_clientapp) == EPOCHS
    plain = run()
    assert series_of(plain) == series_of(result)


def test_trackers_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    built = build_tracker(f"tensorboard:folder={tmp_path}")
    assert isinstance(built, TensorBoard)
    with pytest.raises(ConfigError, match="unknown tracker 'wandb'"):
        build_tracker("wandb")
    with pytest.raises(ConfigError, match="a folder is needed"):
        build_tracker("tensorboard")
