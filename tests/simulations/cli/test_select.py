"""``flower-vfl select``: Δ and γ from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_cases import call

from flower_vfl.objectives import select_delta, select_gamma
from flower_vfl.simulations.cli.select import subset_training
from flower_vfl.simulations.config import RunConfig

FAST = ("--epochs", "20", "--repeats", "1", "--fraction", "0.2", "--deltas", "0.05,0.3")


def test_it_prints_what_the_library_chooses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(capsys, monkeypatch, "select", *FAST, "--json")
    assert code == 0
    found = json.loads(out)
    config = RunConfig(objective="gafm", aggregation="mean", width=1, epochs=20)
    chosen = select_delta(*subset_training(config, 0.2, "delta"), (0.05, 0.3), 1)
    assert found["delta"] == chosen.delta
    assert list(found["ratios"].values()) == list(chosen.ratios.values())
    assert found["gamma"] == select_gamma(*subset_training(config, 0.2, "gamma")).gamma


def test_settings_of_a_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('dataset = "breast-cancer"\nepochs = 20\nseed = 3\n')
    arguments = ("select", "--config", str(file), *FAST[2:])
    code, out, _ = call(capsys, monkeypatch, *arguments)
    assert code == 0
    assert "leaks least relative to its train AUC" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--deltas", "a"), "are not numbers"),
        (
            ("--objective", "cross-entropy"),
            "for the objective 'gafm', not 'cross-entropy'",
        ),
        (("--dataset", "nothing"), "unknown dataset 'nothing'"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, error = call(capsys, monkeypatch, "select", *FAST[:6], *arguments)
    assert code == 2
    assert words in error


def test_a_model_that_has_learned_nothing_chooses_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("--epochs", "1", *FAST[2:])
    code, out, error = call(capsys, monkeypatch, "select", *short)
    assert code == 2
    assert not out
    assert "increase --epochs" in error
    assert "0.05: 0." in error
