"""Pipelining, codecs and local updates in one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_cases import in_sessions, rich, run, stateless
from resume_cases import PowerCutError
from vertical_cases import HookedGrid, PushedGrid, assert_equal

from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import Checkpoints, Compression

CODECS = Compression(*["topk:keep=0.5,feedback=true"] * 2)
ALL: dict[str, Any] = {"compression": CODECS, "local_steps": 3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with rich(folder) as grid:
        return run(folder, grid, **ALL)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda folder: HookedGrid(rich(folder)), id="one at a time"),
        pytest.param(stateless, id="a new process per message"),
        pytest.param(in_sessions, id="resident"),
    ],
)
def test_every_grid_gives_the_same(
    make: Callable[[Path], Any], undisturbed: list[object], tmp_path: Path
) -> None:
    with make(tmp_path) as grid:
        assert_equal(run(tmp_path, grid, **ALL), undisturbed)


def test_each_of_them_changes_the_run(
    undisturbed: list[object], tmp_path: Path
) -> None:
    for changed in ({"pipeline": 1}, {"compression": ""}, {"local_steps": 1}):
        folder = tmp_path / next(iter(changed))
        with rich(folder) as grid:
            assert run(folder, grid, **{**ALL, **changed})[1] != undisturbed[1]


@pytest.mark.parametrize(("kind", "count"), [(HookedGrid, 4), (PushedGrid, 9)])
def test_a_run_resumed_in_mid_epoch_ends_the_same(
    kind: type[HookedGrid], count: int, undisturbed: list[object], tmp_path: Path
) -> None:
    """What error feedback has sent already is not encoded a second time."""
    seen = {"count": 0}

    def cut(message: Any) -> None:
        seen["count"] += message.metadata.message_type == Verb.TRAIN_STEP
        if seen["count"] == count:
            raise PowerCutError

    saved = {**ALL, "checkpoints": Checkpoints(3, tmp_path, keep_final=True)}
    with rich(tmp_path) as grid, pytest.raises(PowerCutError):
        run(tmp_path, kind(grid, cut), **saved)
    with rich(tmp_path) as grid:
        assert_equal(run(tmp_path, kind(grid), resume=True, **saved), undisturbed)
