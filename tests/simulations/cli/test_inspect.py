"""``flower-vfl inspect``, and what ``run`` says about files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cli_cases import call


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    random = np.random.default_rng(0)
    bank = pd.DataFrame({"id": range(90), "debt": random.normal(size=90)})
    bank["y"] = np.where(random.random(90) < 0.5, "good", "bad")
    bank.to_csv("bank.csv", index=False)
    shop = pd.DataFrame({"id": range(90), "spent": random.normal(size=90)})
    shop["copy"] = bank["y"].map({"good": 1, "bad": 0})
    shop.to_csv("shop.csv", index=False, sep=";", decimal=",", encoding="utf-16")
    return ["bank.csv", "shop.csv"]


def test_inspect_prints_a_table_for_each_file(
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, shown, _ = call(capsys, monkeypatch, "inspect", *files, "--label", "y")
    assert code == 0
    assert "bank.csv: 90 rows, CSV, UTF-8, delimiter ',', decimal '.', LF\n" in shown
    assert "shop.csv: 90 rows, CSV, UTF-16, delimiter ';', decimal ',', LF\n" in shown
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    assert ["", "y", "label", "binary", "2", "0", "0", ""] in rows
    assert ["", "spent", "number", "", "90", "0", "0", ""] in rows
    assert shown.endswith(
        "warning: column 'copy' of 'shop.csv' alone predicts the label almost "
        "perfectly; if it follows from the label, leave it out with --drop 'copy'\n"
    )


def test_inspect_as_json(
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = Path("bank.csv").read_text().splitlines()
    text[3] = text[3].replace(text[3].split(",")[1], "n/k")
    Path("bank.csv").write_text("\n".join(text))
    words = ["inspect", *files, "--label", "y", "--json"]
    code, shown, _ = call(capsys, monkeypatch, *words)
    assert code == 2
    document = json.loads(shown)
    bank, shop = document["files"]
    assert set(document) == {"files", "problems", "warnings"}
    assert shop["delimiter"] == ";" and shop["rows"] == 90
    assert bank["columns"][1] == {
        "name": "debt",
        "kind": "number",
        "different": 90,
        "missing": 0,
        "unreadable": 1,
        "examples": ["n/k"],
        "note": "",
        "problem": "1 of 90 values cannot be read as numbers: 'n/k' (row 3); correct "
        "the file, or take them as missing with --missing 'n/k'",
    }
    assert document["problems"] == ["'bank.csv', column 'debt'"]
    code, shown, _ = call(capsys, monkeypatch, *words, "--missing", "n/k")
    assert code == 0
    assert "column 'copy'" in json.loads(shown)["warnings"][0]


def test_inspect_says_what_a_run_would_refuse(
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, shown, _ = call(capsys, monkeypatch, "inspect", *files, "absent.csv")
    assert code == 2
    assert shown.endswith(
        "cannot be used: there is no file 'absent.csv'; check the path\n"
    )
    assert "spent" in shown
    pd.read_csv("bank.csv").astype({"id": float}).to_csv("float.csv", index=False)
    code, shown, _ = call(capsys, monkeypatch, "inspect", "bank.csv", "float.csv")
    assert code == 2
    assert "the ids look alike but are written differently: '0' in 'bank.csv'" in shown
    pd.read_csv("bank.csv").to_csv("text.csv", index=False, columns=["id"])
    text = Path("text.csv").read_text().replace("\n", "\n00")
    Path("padded.csv").write_text(text.removesuffix("00"))
    words = ["align", "text.csv", "padded.csv"]
    code, _, error = call(capsys, monkeypatch, *words)
    assert code == 0
    assert error.startswith("flower-vfl: warning: the ids look alike but are written")
    code, shown, error = call(
        capsys, monkeypatch, *words, "--normalise", "whole_number"
    )
    assert (code, error) == (0, "") and shown.startswith("90 rows aligned by psu")


def test_run_says_what_it_read_but_not_in_json(
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["run", "--label-party", files[0], "--label-column", "y", "--epochs", "1"]
    words += ["--passive", files[1]]
    code, shown, error = call(capsys, monkeypatch, *words)
    assert code == 0, error
    assert shown.splitlines()[:3] == [
        "bank.csv: 90 rows: label 'y' (binary), 1 number; CSV, UTF-8, delimiter ',', "
        "decimal '.', LF",
        "shop.csv: 90 rows: 2 number; CSV, UTF-16, delimiter ';', decimal ',', LF",
        "warning: column 'copy' of 'shop.csv' alone predicts the label almost "
        "perfectly; if it follows from the label, leave it out with --drop 'copy'",
    ]
    code, shown, error = call(capsys, monkeypatch, *words, "--json")
    assert json.loads(shown)["final"] and error == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--normalise", "foo"],
            "unknown normalise 'foo'; known: e164, lower_email, none, whole_number",
        ),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--limit", "1"], "limit must be at least 10, got 1"),
        (
            ["--out", "bank.csv"],
            "--out names a folder for results, but 'bank.csv' is a file",
        ),
        (
            ["--out", "new.parquet"],
            "--out names a folder for results, but 'new.parquet' is a file",
        ),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--learning-rate", "-1"], "'-1' is not a learning rate; write 0.01 or"),
        (["--label-column", "id"], "'id' of '{}' cannot be both id and label"),
        (["--task", "regression"], "'{}', column 'y': a regression needs numbers"),
    ],
)
def test_a_run_that_is_refused(
    arguments: list[str],
    line: str,
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["run", "--label-party", files[0], "--label-column", "y"]
    words += ["--passive", files[1], *arguments]
    code, _, error = call(capsys, monkeypatch, *words)
    expected = f"flower-vfl: {line.format(Path(files[0]).resolve())}"
    assert code == 2
    assert error.startswith(expected)
    assert error.count("\n") == 1
    assert Path("bank.csv").is_file()
