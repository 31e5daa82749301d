"""``flower-vfl matrix``: from the runs to the page, and on after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import call
from study_cases import columns_of, document_of, evaluation_rows, leak_rows

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.studies import trials as trials_module

QUICK = ("matrix", "--quick", "--dataset", "breast-cancer", "--seeds", "1", "--json")


def pretend(config: RunConfig) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a result that a run might have, without a run."""
    auc = 0.85 if config.defense else 0.9
    rows = evaluation_rows(auc=auc) + evaluation_rows("valid", auc=auc)
    leaks = leak_rows({"norm": 0.6 if config.defense else 0.9})
    return document_of(config) | {"records": columns_of(rows + leaks)}, {}


def test_from_the_runs_to_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, folder = tmp_path / "benchmark.md", ("--out", str(tmp_path / "matrix"))
    command = (*QUICK, *folder, "--docs", str(page))
    code, out, _ = call(capsys, monkeypatch, *command)
    assert code == 0
    found = json.loads(out)
    own = [row for row in found["ranking"] if row["dataset"] == "breast-cancer"]
    assert {row["method"] for row in own} == {"none", "marvell", "gafm-original"}
    assert {cell["attack"] for cell in found["cells"]} == {"norm", "embedding"}
    assert {cell["seed"] for cell in found["cells"]} == {0}
    best = own[0]
    assert f"`{best['setting']}` | {best['dcs']:.3f} |" in page.read_text()
    assert f"flower-vfl {' '.join(command)}" in page.read_text()
    # All of it is finished: the same command trains nothing, and finds the same.
    monkeypatch.setattr(trials_module, "run_trial", None)
    code, again, _ = call(capsys, monkeypatch, *command)
    assert code == 0 and json.loads(again)["ranking"] == found["ranking"]


@pytest.mark.parametrize("finished", [3, 6])  # while tuning, and after it
def test_what_was_interrupted_goes_on_without_repeating_a_run(
    finished: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[RunConfig] = []

    def run(config: RunConfig, engine: str) -> Any:
        if len(asked) == finished:
            asked.append(config)
            raise KeyboardInterrupt
        asked.append(config)
        return pretend(config)

    monkeypatch.setattr(trials_module, "run_trial", run)
    command = (*QUICK, "--out", str(tmp_path))
    code, _, error = call(capsys, monkeypatch, *command)
    assert code == 130 and f"{finished} of" in error
    interrupted = asked.pop()
    finished = -1  # it is not interrupted again
    code, out, _ = call(capsys, monkeypatch, *command)
    assert code == 0 and interrupted in asked
    assert len(asked) == len(set(asked)) == 5 + 3  # tuning, then the report
    methods = {cell["method"] for cell in json.loads(out)["cells"]}
    assert methods == {"none", "marvell", "gafm-original"}


def test_the_tables_name_the_best_and_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials_module, "run_trial", lambda config, _: pretend(config))
    command = ("matrix", "--quick", "--seeds", "2", "--out", str(tmp_path))
    code, out, _ = call(capsys, monkeypatch, *command)
    assert code == 0
    score = 1 / (1 + (0.5 * 0.1**2 + 0.5 * 0.05**2) ** 0.5)
    assert f"Best by DCS: marvell ({score:.3f})" in out
    assert "Left out: gafm-original: objective 'gafm-original' is not for" in out


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("--tuning-seed", "1"), "the tuning seed 1 is one of the report's seeds"),
        (("--split-seed", "-1"), "set --split-seed"),
        (("--method", "marvel"), "marvell"),
        (("--dataset", "diabetes"), "is a regression"),
        (("--beta", "2"), "a weight from 0 to 1"),
        (("--grid", "nothing.toml"), "'nothing.toml' is not a matrix"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_run(
    given: tuple[str, str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials_module, "run_trial", None)
    code, _, error = call(capsys, monkeypatch, "matrix", *given)
    assert code == 2 and problem in error
