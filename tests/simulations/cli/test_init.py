"""``flower-vfl init``: from files to a configuration that runs."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cli_cases import call

Init = Callable[..., tuple[int, str, str]]


@pytest.fixture
def init(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Init:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    random = np.random.default_rng(0)
    bank = pd.DataFrame({"no": range(90), "id": range(90), "debt": random.random(90)})
    bank["y"] = np.where(random.random(90) < 0.5, "good", "bad")
    bank.to_csv("bank.csv", index=False)
    shop = pd.DataFrame({"id": range(90), "spent": random.random(90)})
    shop.to_csv("shop.csv", index=False, sep=";", decimal=",")
    return lambda *words: call(capsys, monkeypatch, *words)


def settings() -> dict[str, object]:
    return tomllib.loads(Path("data.toml").read_text())


def test_the_file_with_the_label_is_the_label_partys_and_the_run_works(
    init: Init,
) -> None:
    code, shown, error = init("init", "shop.csv", "bank.csv", "--label", "y")
    assert (code, error) == (0, "")
    assert shown == "wrote data.toml; next: flower-vfl run --config data.toml\n"
    assert settings() == {
        "label-party": "bank.csv",
        "passive": ["shop.csv"],
        "id-column": "id",  # shared and unique
        "label-column": "y",
        "task": "binary",
    }
    text = Path("data.toml").read_text()
    assert "# shop.csv: 90 rows, CSV, UTF-8, delimiter ';', decimal ',', LF\n" in text
    assert "#   spent: number\n" in text
    assert "#   no: number; different in every row: id?\n" in text
    assert "#   y: label; binary\n" in text
    code, shown, error = init("run", "--config", "data.toml", "--epochs", "1")
    assert code == 0, error
    assert "bank.csv: 1 passive party" in shown
    words = ["--defense", "max-norm", "--seeds", "1", "--epochs", "1", "--out", "study"]
    code, shown, error = init("compare", "--config", "data.toml", *words)
    assert code == 0, error
    assert "max-norm" in shown


def test_columns_that_stop_a_run_are_left_out_and_leaks_are_named(init: Init) -> None:
    shop = pd.read_csv("shop.csv", sep=";", decimal=",").astype({"spent": object})
    shop.loc[3, "spent"] = "n/k"
    shop["day"] = "2020-01-" + (shop["id"] % 28 + 1).astype(str).str.zfill(2)
    shop["copy\nof y"] = pd.read_csv("bank.csv")["y"] == "good"
    shop["often"] = np.resize(["a", "b", ""], 90)
    shop.to_csv("shop.csv", index=False)
    code, shown, error = init("init", "bank.csv", "shop.csv", "--label", "y")
    assert code == 0, error
    assert settings()["drop"] == ["spent", "day"]
    text = Path("data.toml").read_text()
    assert "#   often: category; 33% missing\n" in text
    assert "#   spent: left out; 1 of 90 values cannot be read as numbers" in text
    assert "# warning: column 'copy of y' of 'shop.csv' alone predicts" in text
    assert "left out: column 'spent': 1 of 90 values cannot be read" in shown
    code, shown, error = init("run", "--config", "data.toml", "--epochs", "1")
    assert code == 0, error
    Path("data.toml").unlink()
    words = ["init", "bank.csv", "shop.csv", "--label", "y", "--missing", "n/k"]
    assert init(*words)[0] == 0
    assert settings()["drop"] == ["day"] and settings()["missing"] == ["n/k"]


def test_ids_that_differ_are_aligned(init: Init) -> None:
    shop = pd.read_csv("shop.csv", sep=";", decimal=",")
    shop["id"] = (shop["id"] + 7).astype(str).str.zfill(4)
    shop.to_csv("shop.csv", index=False)
    code, shown, error = init("init", "bank.csv", "shop.csv", "--label", "y")
    assert code == 0, error
    found = settings()
    assert (found["alignment"], found["normalise"]) == ("psi", "whole_number")
    assert "alignment psi" in shown
    code, _, error = init("run", "--config", "data.toml", "--epochs", "1")
    assert code == 0, error


def test_what_is_not_given_is_asked_for(
    init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked, answers = [], iter(["bank.csv", "shop.csv", "", "y"])

    def prompt(question: str, default: str | None = None) -> str:
        asked.append((question, default))
        return next(answers)

    monkeypatch.setattr("typer.prompt", prompt)
    code, shown, error = init("init")
    assert code == 0, error
    assert asked == [
        ("File of the party with the labels", None),
        ("File of another party (empty: no more)", ""),
        ("File of another party (empty: no more)", ""),
        ("Label column", "y"),
    ]
    assert "'bank.csv' has no, id, debt, y; 'shop.csv' has id, spent" in shown
    assert settings()["label-column"] == "y"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the files, as in: flower-vfl init bank.csv"),
        (["bank.csv", "shop.csv"], "give --label, as in: flower-vfl init"),
        (["bank.csv"], "give at least two files"),
        (["bank.csv", "bank.csv"], "give at least two files"),
        (["bank.csv", "none.csv"], "there is no file 'none.csv'"),
        (["bank.csv", "shop.csv", "--label", "z"], "no file has a column 'z'; 'bank"),
        (["bank.csv", "shop.csv", "--label", "no"], "'bank.csv', column 'no': 90 labe"),
        (["bank.csv", "shop.csv", "--id", "q", "--label", "y"], "no column 'q'"),
        (["bank.csv", "a,b.csv", "--label", "y"], "'a,b.csv' has a comma"),
        (["bank.csv", "else.csv", "--label", "y"], "the files share no id"),
        (["bank.csv", "twice.csv", "--label", "y"], "row: 'id' repeats in 'twice.csv'"),
        (
            ["bank.csv", "named.csv", "--label", "y"],
            "row: the column with the ids needs",
        ),
    ],
)
def test_errors_name_the_remedy(words: list[str], message: str, init: Init) -> None:
    shop = pd.read_csv("shop.csv", sep=";", decimal=",")
    shop.to_csv("a,b.csv", index=False)
    shop.assign(id=shop["id"] + 1000).to_csv("else.csv", index=False)
    shop.assign(id=1).to_csv("twice.csv", index=False)
    shop.rename(columns={"id": "key"}).to_csv("named.csv", index=False)
    code, _, error = init("init", *words)
    assert code == 2 and message in error
    assert error.count("\n") == 1
    assert not Path("data.toml").exists()


def test_a_file_is_not_overwritten(init: Init) -> None:
    Path("data.toml").write_text("mine")
    code, _, error = init("init", "bank.csv", "shop.csv", "--label", "y")
    assert code == 2 and "'data.toml' exists already" in error
    assert Path("data.toml").read_text() == "mine"
