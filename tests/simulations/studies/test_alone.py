"""What the label party reaches alone, in a run's result and on the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from cli_cases import call
from sklearn.datasets import make_classification

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import load_result, table
from flower_vfl.simulations.studies.tradeoff import untrained
from flower_vfl.simulations.studies.trials import guess, train_alone


def test_a_guess_names_the_largest_class() -> None:
    assert guess(RunConfig(dataset="breast-cancer")) == 0.5
    assert guess(RunConfig(dataset="diabetes")) == 0.0
    assert guess(RunConfig(dataset="digits")) == pytest.approx(183 / 1797)


def test_a_label_party_without_columns_trains_nothing() -> None:
    assert train_alone(RunConfig(), 1, "test") == {}


def test_alone_depends_on_the_label_partys_own_columns(tmp_path: Path) -> None:
    """Labels follow from the label party's columns, or from the other party's."""
    features, labels = make_classification(
        400, 4, n_informative=2, n_redundant=0, shuffle=False, random_state=0
    )
    names = ["a", "b", "noise", "more"]
    whole = pd.DataFrame(features, columns=names).assign(y=labels, id=range(400))
    whole[["id", "a", "b", "y"]].to_csv(tmp_path / "good.csv", index=False)
    whole[["id", "noise", "more", "y"]].to_csv(tmp_path / "bad.csv", index=False)
    whole[["id", "more"]].to_csv(tmp_path / "other.csv", index=False)
    found = {}
    for name in ("good", "bad"):
        config = RunConfig(
            label_party=str(tmp_path / f"{name}.csv"),
            passive=str(tmp_path / "other.csv"),
            label_column="y",
            parties=1,
            batch_size=64,
        )
        found[name] = train_alone(config, 15, "test")["auc"]
        assert found[name] == train_alone(config, 15, "test")["auc"]
    assert found["good"] > 0.85 and found["bad"] < 0.65


def test_a_run_says_what_others_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["run", "--label-share", "0.3", "--parties", "1", "--epochs", "2"]
    arguments += ["--attack", "cosine", "--out", str(tmp_path)]
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert (code, err) == (0, "")
    document = load_result(tmp_path)
    alone, final = document["alone"]["auc"], document["final"]["test_auc"]
    line = f"the label party alone: AUC {alone:.3f}; with 1 passive party: {final:.3f};"
    assert f"{line} largest leak 1.00 (cosine at passive-1)" in out
    kept = table(document).query("split == 'alone' and metric == 'auc'")
    assert kept["value"].tolist() == [alone]
    call(capsys, monkeypatch, *arguments, "--overwrite", "--no-alone")
    assert "alone" not in load_result(tmp_path)


def test_a_run_of_classes_knows_its_guess(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", "--dataset", "digits", "--epochs", "1", "--limit", "300"]
    arguments += ["--learning-rate", "1e-9", "--json"]
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 0, err
    records = table(json.loads(out)).assign(run="a")
    assert untrained(records)["a"] == "no better than a guess"
