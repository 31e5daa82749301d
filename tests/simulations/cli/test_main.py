"""The command line, as a newcomer would use it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from cli_cases import call, training_losses
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.cli import main as cli
from flower_vfl.simulations.config import RunConfig, parse_rates

APP = Path(cli.__file__).parents[1] / "label_leakage"


@pytest.fixture(autouse=True)
def flower_log() -> Iterator[None]:
    """Give Flower's log back the level that the command changes."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two organisations' files about the same people, in different row orders."""
    frame, labels = load_breast_cancer(return_X_y=True, as_frame=True)
    ids = [f"c{number:04d}" for number in range(len(frame))]
    bank = pd.DataFrame({"id": ids, "y": np.where(labels == 1, "good", "bad")})
    bank["income"] = frame.iloc[:, 0]
    shop = frame.iloc[:, 1:].copy()
    shop.insert(0, "id", ids)
    bank.sample(frac=1, random_state=1).to_csv(tmp_path / "bank.csv", index=False)
    shop.sample(frac=1, random_state=2).to_parquet(tmp_path / "shop.parquet")
    return tmp_path


def test_run_prints_a_table_and_json_prints_json_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown, _ = call(capsys, monkeypatch, "run", "--epochs", "2")
    assert code == 0
    assert "test auc" in shown
    assert "passive parties" in shown
    code, shown, told = call(capsys, monkeypatch, "run", "--epochs", "2", "--json")
    document = json.loads(shown)
    assert len(training_losses(document)) == 2
    assert document["config"]["epochs"] == 2
    assert document["versions"]["torch"]
    assert document["seconds"]["total"] > document["seconds"]["training"] > 0
    assert (code, told) == (0, "")


@pytest.mark.parametrize(
    "defended",
    [
        [],
        pytest.param(["--defense", "iso:t=0.1"], marks=pytest.mark.extra),
        ["--defense", "iso:t=0.1", "--defense-at", "label", "--sealed"],
    ],
    ids=["vanilla", "strategy", "sealed"],
)
def test_own_files_from_training_to_prediction(
    defended: list[str],
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank, shop, out = files / "bank.csv", files / "shop.parquet", files / "out"
    own = ["--label-party", str(bank), "--label-column", "y", "--passive", str(shop)]
    own += defended
    code, shown, error = call(
        capsys, monkeypatch, "run", *own, "--id-column", "id", "--out", str(out)
    )
    assert code == 0, error
    assert re.search(r"bank\.csv: 1 passive party\b", shown)
    final = json.loads((out / "result.json").read_text())["final"]
    assert final["test_auc"] > 0.97
    states = {p.parent.name for p in (out / "parties").glob("*/final.pt")}
    assert states == {"label", "passive-1", "strategy"}
    module = torch.load(out / "parties" / "passive-1" / "final.pt")["model"]
    assert all(torch.isfinite(weight).all() for weight in module.values())

    table = files / "predictions.csv"
    code, _, error = call(capsys, monkeypatch, "predict", str(out), "--out", str(table))
    assert code == 0, error
    predicted = pd.read_csv(table).merge(pd.read_csv(bank), on="id")
    auc = roc_auc_score(predicted["y"] == "good", predicted["probability of good"])
    assert auc == pytest.approx(final["test_auc"], abs=1e-9)

    # New rows, without labels and in another order, get what they got before.
    new_bank, new_shop = files / "new_bank.csv", files / "new_shop.csv"
    some = predicted["id"].iloc[:7]
    known = pd.read_csv(bank)
    known[known["id"].isin(some)].drop(columns="y").to_csv(new_bank, index=False)
    bought = pd.read_parquet(shop)
    bought[bought["id"].isin(some)].to_csv(new_shop, index=False)
    new = ["--label-party", str(new_bank), "--passive", str(new_shop)]
    code, output, error = call(capsys, monkeypatch, "predict", str(out), *new, "--json")
    assert code == 0, error
    again = pd.DataFrame(json.loads(output)).merge(predicted, on="id")
    assert len(again) == 7
    code, _, error = call(capsys, monkeypatch, "predict", str(out), "--out", "no/x.csv")
    assert code == 2 and "cannot use 'no/x.csv'" in error
    swapped = ["--label-party", str(new_shop), "--passive", str(new_bank)]
    refused = {"new files for them: 0; give --passive": new[:2]}
    refused[f"'{new_shop}': columns ['income'] are missing"] = swapped
    for problem, given in refused.items():
        code, _, error = call(capsys, monkeypatch, "predict", str(out), *given)
        assert code == 2 and problem in error
    code, _, error = call(capsys, monkeypatch, "predict", str(out), *new[2:])
    assert code != 0 and "--label-party FILE" in " ".join(error.split())
    np.testing.assert_allclose(
        again["probability of good_x"], again["probability of good_y"], atol=1e-5
    )


def test_ids_that_do_not_match_are_refused(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = files / "bank.csv"
    shop = pd.read_parquet(files / "shop.parquet")
    shop.iloc[:-20].to_csv(files / "fewer.csv", index=False)
    shop.assign(id=shop["id"] + "x").to_csv(files / "others.csv", index=False)
    for name, problem in (("fewer.csv", "fewer ids"), ("others.csv", "ids differ")):
        own = ["--label-party", str(bank), "--label-column", "y"]
        code, _, error = call(
            capsys, monkeypatch, "run", *own, "--passive", str(files / name)
        )
        assert code == 1
        assert problem in error
        assert "passive-1" in error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dataset", "nope"], "breast-cancer"),
        (["--model", "nope"], "wide-deep"),
        (["--top", "nope"], "linear"),
        (["--aggregation", "nope"], "concat"),
        (["--objective", "nope"], "cross-entropy"),
        (["--optimizer", "nope"], "adam"),
        (["--optimizer", "adam:lr=-1"], "optimizer 'adam': Invalid learning rate: -1"),
        (["--engine", "nope"], "in-process"),
        (["--objective", "mean-squared-error"], "binary"),
        (["--dataset", "diabetes", "--objective", "cross-entropy"], "regression"),
        (["--parties", "0"], "parties"),
        (["--parties", "99"], "30 columns"),
        (["--parties", "99"], "or a smaller --label-share."),
        (["--patience", "2"], "validation"),
        (["--device", "nope"], "cpu"),
        (["--learning-rate", "fast"], "label=0.01"),
        (["--learning-rate", "nobody=0.1"], "passive-1"),
        (["--label-party", "missing.csv"], "passive"),
        (["--resume"], "--out"),
    ],
)
def test_a_wrong_argument_says_what_would_be_right(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, error = call(capsys, monkeypatch, "run", *arguments)
    assert code in (1, 2)
    assert expected in error
    assert "Traceback" not in error


def test_a_bound_is_stated_with_its_assumptions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "--epochs", "1", "--no-alone", "--defense", "marvell:auc=0.65"]
    _, shown, _ = call(capsys, monkeypatch, *words)
    line = "under the defense's assumptions, no attack on the gradients of passive-1"
    assert f"{line} has an AUC above 0.650" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["init", "bank.csv", "shop.csv", "--label", "y", "--out", "no/x.toml"], "no/"),
        (["align", "bank.csv", "shop.csv", "--out-dir", "bank.csv"], "bank.csv"),
        (["new", "app-one", "--folder", "bank.csv"], "bank.csv/app-one"),
        (["compare", "--out", "bank.csv/deep"], "bank.csv/deep"),
    ],
)
def test_a_path_that_cannot_be_written_is_named(
    arguments: list[str],
    path: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, column in (("bank", "y"), ("shop", "x")):
        rows = {"id": range(8), column: [0, 1] * 4}
        pd.DataFrame(rows).to_csv(f"{name}.csv", index=False)
    code, _, error = call(capsys, monkeypatch, *arguments)
    assert code == 2 and error.count("\n") == 1
    assert f"cannot use '{path}" in error and "check the path" in error
    code, _, error = call(capsys, monkeypatch, "report", ".", "--figures", "bank.csv")
    assert code == 2 and "--figures names a folder" in error


def test_a_clone_does_not_hide_parts_of_the_installed_package() -> None:
    """After a plain ``pip install .``, in the clone's root."""
    code = "import flower_vfl.simulations.cli.main, importlib.util as found"
    for name in ("strategies", "simulations.app"):  # without importing PyTorch
        code += f"; assert found.find_spec('flower_vfl.{name}')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without the finder of an editable install
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_predict_refuses_a_folder_without_a_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, error = call(capsys, monkeypatch, "predict", str(tmp_path))
    assert code == 2
    assert "result.json" in error


def test_resume_continues_a_run_to_the_same_end(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    call(capsys, monkeypatch, "run", "--epochs", "4", "--out", str(whole))
    first = ["--epochs", "2", "--checkpoint-every", "2", "--out", str(parts)]
    call(capsys, monkeypatch, "run", *first)
    again = ["--epochs", "4", "--resume", "--out", str(parts)]
    code, _, error = call(capsys, monkeypatch, "run", *again)
    assert code == 0, error
    for party in ("label", "passive-1", "passive-2"):
        one = torch.load(whole / "parties" / party / "final.pt")
        two = torch.load(parts / "parties" / party / "final.pt")
        for module in {"model", "objective"} & one.keys():
            for name, weight in one[module].items():
                assert torch.equal(weight, two[module][name])


def test_a_run_is_replaced_only_if_asked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["run", "--limit", "100", "--epochs", "1", "--out", str(tmp_path / "run")]
    result = tmp_path / "run" / "result.json"
    kept = tmp_path / "run" / "parties" / "label" / "final.pt"
    assert call(capsys, monkeypatch, *words)[0] == 0
    before = result.read_bytes(), kept.read_bytes()

    code, _, error = call(capsys, monkeypatch, *words, "--seed", "1")
    assert code == 2 and error.count("\n") == 1
    assert f"'{tmp_path / 'run'}' already holds a run" in error
    assert "--resume" in error and "--overwrite" in error
    assert (result.read_bytes(), kept.read_bytes()) == before

    code, _, error = call(capsys, monkeypatch, *words, "--seed", "1", "--overwrite")
    assert code == 0, error
    assert json.loads(result.read_text())["config"]["seed"] == 1
    assert kept.read_bytes() != before[1]

    result.unlink()  # as if the run had been killed: its checkpoints remain
    code, _, error = call(capsys, monkeypatch, *words)
    assert code == 2 and "already holds a run" in error


def test_a_folder_without_a_run_is_no_obstacle(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    words = ["run", "--limit", "100", "--epochs", "1", "--out", str(tmp_path)]
    code, _, error = call(capsys, monkeypatch, *words)
    assert code == 0, error
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_flower_app_knows_every_setting_with_its_default() -> None:
    app = tomllib.loads((APP / "pyproject.toml").read_text())
    assert app["tool"]["flwr"]["app"]["config"] == RunConfig().to_run_config()
    # Flower's hub asks for flwr; `flwr run` must not install it into an environment.
    (needed,) = app["project"]["dependencies"]
    assert needed.startswith("flwr>=")
    assert app["tool"]["uv"]["exclude-dependencies"] == ["flwr"]


def test_settings_survive_flowers_run_config() -> None:
    config = RunConfig(parties=5, test_fraction=0.3, resume=True, split="widths=1,2")
    assert RunConfig.from_run_config(config.to_run_config()) == config
    assert RunConfig.from_run_config({"test-fraction": 0}).test_fraction == 0.0
    with pytest.raises(ConfigError, match="batch-size"):
        RunConfig.from_run_config({"batchsize": 3})
    with pytest.raises(ConfigError, match="must be a int"):
        RunConfig.from_run_config({"epochs": "many"})


def test_learning_rates_from_text() -> None:
    assert parse_rates("") is None
    assert parse_rates("0.5") == 0.5
    assert parse_rates("label=0.1, passive-1=0.2") == {"label": 0.1, "passive-1": 0.2}
