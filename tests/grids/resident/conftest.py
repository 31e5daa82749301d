"""Fixtures of the tests of resident sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from resident_cases import RUN_ID, GridMaker, PlainGrid, counting_app

from flower_vfl.grids.resident import Limits, ResidentGrid, resident


@pytest.fixture(autouse=True, scope="module")
def _identity() -> Iterator[None]:
    """Let messages be made in this process, and poll and log without delay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flower_vfl.grids.resident.grid._SLOW_POLL", 0.1)
        patch.setattr("flower_vfl.grids.resident.admission._LINES", 1000)
        patch.setattr(TaskIdentity, "_run_id", RUN_ID)
        patch.setattr(TaskIdentity, "_node_id", 1)
        patch.setattr(TaskIdentity, "_task_id", 1)
        yield


@pytest.fixture(params=[True, False], ids=["detached", "blocking"])
def detached(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@contextmanager
def grid_maker() -> Iterator[GridMaker]:
    """Yield a function that makes grids over a counting app, and close them."""
    made: list[ResidentGrid] = []

    def make(
        nodes: int = 2,
        *,
        app: ClientApp | None = None,
        unresponsive: Iterable[int] = (),
        detached: bool = True,
        limits: Limits | None = None,
        **options: object,
    ) -> ResidentGrid:
        plain = PlainGrid(app or resident(counting_app()), nodes, unresponsive)
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


@pytest.fixture
def make_grid() -> Iterator[GridMaker]:
    with grid_maker() as make:
        yield make


@pytest.fixture(scope="module")
def make_module_grid() -> Iterator[GridMaker]:
    with grid_maker() as make:
        yield make
