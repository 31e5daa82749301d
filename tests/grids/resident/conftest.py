"""Fixtures of the tests of resident sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from resident_cases import RUN_ID, GridMaker, PlainGrid, counting_app

from flower_vfl.grids.resident import Limits, ResidentGrid, resident


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskIdentity, "_run_id", RUN_ID)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


@pytest.fixture(params=[True, False], ids=["detached", "blocking"])
def detached(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make_grid() -> Iterator[GridMaker]:
    """Return a maker of grids over a counting app; they are closed afterwards."""
    made: list[ResidentGrid] = []

    def make(
        nodes: int = 2,
        *,
        app: ClientApp | None = None,
        deaf: Iterable[int] = (),
        detached: bool = True,
        limits: Limits | None = None,
        **options: object,
    ) -> ResidentGrid:
        plain = PlainGrid(app or resident(counting_app()), nodes, deaf)
        options.setdefault("open_timeout", 10.0)
        grid = ResidentGrid(
            plain,
            detached=detached,
            limits=limits or Limits(silence=3.0, authenticate=2.0),
            **options,  # type: ignore[arg-type]
        )
        made.append(grid)
        return grid

    yield make
    for grid in made:
        grid.close()
