"""Call the command in this process, and read what a run measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flower_vfl.simulations.cli import main as cli
from flower_vfl.simulations.report import REPORT_FILE
from flower_vfl.simulations.results import table


def call(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
) -> tuple[int, str, str]:
    """Call the command in this process, which saves the imports."""
    monkeypatch.setattr(sys, "argv", ["flower-vfl", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def undrawn(folder: Path, pictures: bool = False) -> Path:
    """Stand in for the report of a study, whose charts take longer than its runs."""
    path = folder / REPORT_FILE
    path.write_text("")
    return path


def training_losses(document: Mapping[str, Any]) -> list[float]:
    """Return the training loss of each epoch."""
    found = table(document).query("metric == 'loss' and split == 'train'")
    return [float(value) for value in found.sort_values("epoch")["value"]]
