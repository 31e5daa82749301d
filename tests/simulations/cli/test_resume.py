"""What a user sees who resumes a run, or tries to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import call, training_losses
from fault_cases import newest_step

from flower_vfl.simulations.cli.options import as_options
from flower_vfl.simulations.results import load_result

SMALL = ("run", "--limit", "120", "--batch-size", "32", "--checkpoint-every", "2")


@pytest.fixture(autouse=True)
def flower_log() -> Iterator[None]:
    """Give Flower's log back what the command changes."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)
    logger.filters.clear()


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SMALL, "--out", str(tmp_path / "run"))
    assert call(capsys, monkeypatch, *words, "--epochs", "2")[0] == 0
    folder = tmp_path / "run" / "parties" / "passive-1"
    newest = folder / f"step-{newest_step(folder)}.pt"
    newest.write_bytes(newest.read_bytes()[:-9] + b"x" * 9)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda line: lines.append(line.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    more = ("--epochs", "3", "--resume")
    code, _, said = call(capsys, monkeypatch, *words, *more)
    logging.getLogger("flwr").removeHandler(handler)
    assert code == 0, said
    assert any(str(newest) in line and "damaged" in line for line in lines), lines
    whole = (*SMALL, "--out", str(tmp_path / "whole"), "--epochs", "3")
    assert call(capsys, monkeypatch, *whole)[0] == 0
    losses = [training_losses(load_result(tmp_path / n)) for n in ("run", "whole")]
    assert losses[0] == losses[1]


def test_an_error_names_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SMALL, "--out", str(tmp_path), "--resume")
    code, _, said = call(capsys, monkeypatch, *words)
    assert code == 2 and "without --resume" in said and said.count("\n") == 1
    sealed = ("run", "--sealed", "--defense", "iso:t=4")
    code, _, said = call(capsys, monkeypatch, *sealed)
    assert code == 2 and said.endswith("apply the defense (--defense-at label)\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("start with resume=True.", "start with --resume."),
        ("start without resume", "start without --resume"),
        ("it cannot resume with that", "it cannot resume with that"),
        ("batch_size must not be", "--batch-size must not be"),
        ("'/tmp/batch_size/a.csv' is", "'/tmp/batch_size/a.csv' is"),
        ("set Checkpoints(every=...)", "set --out and --checkpoint-every"),
    ],
)
def test_api_names_become_options(text: str, shown: str) -> None:
    assert as_options(text) == shown
