"""The command, called in this process."""

from __future__ import annotations

import sys

import pytest

from flower_vfl.simulations.cli import main as cli


def call(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
) -> tuple[int, str, str]:
    """Call the command in this process, which spares the imports."""
    monkeypatch.setattr(sys, "argv", ["flower-vfl", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err
