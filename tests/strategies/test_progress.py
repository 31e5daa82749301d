"""Progress bars of one run and of many."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.studies.study import run_study
from flower_vfl.simulations.studies.trials import Trial
from flower_vfl.strategies import progress


def _terminal(monkeypatch: pytest.MonkeyPatch, is_one: bool) -> io.StringIO:
    written = io.StringIO()

    def console(**_: Any) -> Console:
        return Console(file=written, width=80, force_terminal=is_one)

    monkeypatch.setattr(progress, "Console", console)
    return written


def test_a_training_shows_the_time_left_in_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = _terminal(monkeypatch, True)
    with progress.TrainingProgress(20, 50, 0, None) as bar:
        for step in range(1, 400):
            bar.stepped(step, 1 + step // 50, 0.1234)
        bar.evaluated("auc", 0.9812)
        bar.refresh()
    text = written.getvalue()
    assert "epoch 8/20" in text and "399/1000" in text and "0:00:0" in text
    assert "loss 0.1234" in text and "0.9812" in text


@pytest.mark.parametrize(
    ("is_terminal", "bar"), [(True, True), (True, False), (False, True)]
)
def test_a_study_shows_its_runs_and_the_one_under_way(
    is_terminal: bool, bar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _terminal(monkeypatch, is_terminal)
    told: list[tuple[int, float, int]] = []
    stepped = progress.StudyProgress._stepped

    def note(self: Any, *at: Any) -> None:
        stepped(self, *at)
        told.append(at)
        self.refresh()

    monkeypatch.setattr(progress.StudyProgress, "_stepped", note)
    config = RunConfig(limit=100, batch_size=20, epochs=2)
    trials = [
        Trial({"seed": str(s)}, RunConfig(**{**vars(config), "seed": s}))
        for s in (0, 1)
    ]
    run_study(tmp_path, "sweep", "two runs", trials, bar=bar)
    text = written.getvalue()
    if not (is_terminal and bar):
        assert not text and not told
        return
    assert told == [(step, 8.0, 1 + (step - 1) // 4) for step in range(1, 9)] * 2
    assert "two runs" in text and "1/2" in text and "epoch 2" in text
    monkeypatch.setattr(progress.StudyProgress, "_stepped", stepped)
    assert not progress.TrainingProgress(1, 1, 0, False).shown  # nobody watches now
