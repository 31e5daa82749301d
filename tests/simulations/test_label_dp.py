"""``label-dp`` on the command line, in a config file and in a node config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cli_cases import call
from flwr.app import Context, RecordDict
from sklearn.metrics import log_loss, roc_auc_score

from flower_vfl import ConfigError
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.privacy import LabelPrivacy
from flower_vfl.simulations.app import label_at
from flower_vfl.simulations.cli.options import read_settings
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.datasets import load_dataset

Capture = pytest.CaptureFixture[str]
SHORT = ("--epochs", "2", "--valid-fraction", "0.2")


def test_a_private_run_and_its_predictions(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    given = ("--label-dp", "auc=0.65", "--defense", "iso", "--attack", "norm")
    code, shown, error = call(
        capsys, monkeypatch, "run", *SHORT, *given, "--out", str(out)
    )
    assert code == 0, error
    assert "0.650" in shown  # the bound is stated
    document = json.loads((out / "result.json").read_text())
    found = document["label_privacy"]
    assert found["mechanism"] == "randomised-response" and found["delta"] == 0.0
    assert found["auc_bound"] == pytest.approx(0.65)
    assert found["epsilon"] == pytest.approx(np.log(0.65 / 0.35))
    assert "test_ace" in document["final"]
    state = DirectoryStore(out / "parties" / "label").load("final")
    assert state["loss"] in ("plain", "unbiased", "forward")

    table = tmp_path / "predictions.csv"
    code, _, error = call(capsys, monkeypatch, "predict", str(out), "--out", str(table))
    assert code == 0, error
    predicted = pd.read_csv(table).set_index("id")
    truth = pd.Series(load_dataset("breast-cancer").labels)[predicted.index]
    chance = predicted.filter(like="probability").iloc[:, -1]
    assert chance.between(0.0, 1.0).all()
    # These are the very probabilities that the run was evaluated with.
    final = document["final"]
    assert roc_auc_score(truth, chance) == pytest.approx(final["test_auc"], abs=1e-9)
    assert log_loss(truth, chance) == pytest.approx(final["test_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--label-budget", "auc=0.6"], ["label", "auc 0.6", "no bound", "label-dp"]),
        (["--label-budget", "auc=0.6", "--label-dp", "auc=0.65"], ["auc 0.65"]),
        (["--label-dp", "auc=0.4"], ["between 0.5 and 1"]),
        (["--label-dp", "auc=0.6,epsilon=1"], ["either auc=0.65 or epsilon=1"]),
        (["--label-dp", "auc=0.7", "--leak-limit", "0.6"], ["leak limit", "remove it"]),
        (["--dataset", "diabetes", "--label-dp", "auc=0.7"], ["low=", "high="]),
    ],
)
def test_refused(
    arguments: list[str],
    words: list[str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, error = call(capsys, monkeypatch, "run", *SHORT, *arguments)
    assert code in (1, 2)
    shown = " ".join(error.replace("│", " ").split())
    for word in words:
        assert word in shown
    assert "Traceback" not in error


@pytest.mark.parametrize("option", ["--label-dp", "--label-budget"])
def test_select_looks_at_true_labels_and_is_refused(
    option: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = call(capsys, monkeypatch, "select", option, "auc=0.7")
    assert code in (1, 2)
    assert "true labels" in " ".join(error.replace("│", " ").split())


def test_the_key_of_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = "auc=0.65,mechanism=gaussian,loss=forward"
    file.write_text(f'label-dp = "{text}"\nlabel-budget = "auc=0.7"\ncanaries = 5\n')
    config = RunConfig.from_run_config(read_settings(file))
    assert config.label_privacy() == LabelPrivacy(
        auc=0.65, mechanism="gaussian", loss="forward", budget="auc=0.7", canaries=5
    )
    assert RunConfig().label_privacy() is None
    with pytest.raises(ConfigError, match="mechanism"):
        RunConfig(label_dp="auc=0.65,mechanism=exponential")


def privacy_at(node: dict[str, Any], **settings: Any) -> LabelPrivacy | None:
    """Return the label privacy of a node."""
    config = RunConfig(**settings).to_run_config()
    own = {"partition-id": 0, "num-partitions": 3, **node}
    return label_at(Context(1, 1, own, RecordDict(), config)).label_privacy


def test_a_node_wins_over_the_run() -> None:
    strict = {"label-dp": "auc=0.6"}
    assert privacy_at(strict) == LabelPrivacy(auc=0.6)
    assert privacy_at(strict, label_dp="auc=0.9") == LabelPrivacy(auc=0.6)
    assert privacy_at({}, label_dp="auc=0.9") == LabelPrivacy(auc=0.9)
    # One setting of its own leaves the others as the run has them.
    budget = {"label-budget": "auc=0.7"}
    both = LabelPrivacy(auc=0.9, budget="auc=0.7")
    assert privacy_at(budget, label_dp="auc=0.9") == both


def test_the_range_of_a_node_is_the_unit_of_its_regression() -> None:
    """Mean and deviation of true labels would be seen in predictions."""
    node = {"label-dp": "epsilon=2,low=0,high=400"}
    settings = RunConfig(dataset="diabetes").to_run_config()
    own = {"partition-id": 0, "num-partitions": 3, **node}
    objective = label_at(Context(1, 1, own, RecordDict(), settings)).objective
    assert (float(objective.center), float(objective.scale)) == (200.0, 100.0)  # type: ignore[arg-type]
