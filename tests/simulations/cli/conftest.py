"""Reports are drawn only where a test asks for it: they take longer than the runs."""

from __future__ import annotations

import pytest
from cli_cases import undrawn

from flower_vfl.simulations.cli import options


@pytest.fixture
def drawn() -> None:
    """Let commands draw their reports."""


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an empty page in the place of a study's report, unless `drawn` is asked."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(options, "write_report", undrawn)
