"""Runs that go on with an alignment, and those that make a new one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment_cases import NAMES, alignment_of, make_app, make_strategy, secrets_of
from flwr.app import Message
from vertical_cases import HookedGrid, StatelessGrid, assert_equal, losses

from flower_vfl import ConfigError, InProcessGrid, PartyError
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.protocol import replay
from flower_vfl.protocol.messages import Verb, read
from flower_vfl.strategies import Checkpoints


def start(folder: Path, stages: list[str] | None = None, **options: Any) -> Any:
    """Run in new parties with checkpoints in a folder; return result and parties."""
    checkpoints = Checkpoints(every=2, folder=folder, keep_final=True)
    rounds, resume = options.pop("rounds", 1), options.pop("resume", False)
    strategy = make_strategy(**{"checkpoints": checkpoints, **options})
    inner = InProcessGrid(make_app(), 3, {"state-dir": str(folder)})

    def note(message: Message) -> None:
        if stages is not None and message.metadata.message_type == Verb.ALIGN:
            stages.append(read(message).text("stage"))

    grid = HookedGrid(inner, note)
    result = strategy.start(grid, num_rounds=rounds, resume=resume)
    return result, inner.parties()


def test_a_resumed_run_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    first, before = start(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    stages: list[str] = []
    second, after = start(tmp_path / "one", stages, rounds=3, resume=True)
    assert stages == ["apply"] * 3  # no new handshake
    for name, party in before.items():
        assert torch.equal(party.row_index.local, after[name].row_index.local)
    assert losses(second)[1] == losses(first)[1]
    third, _ = start(tmp_path / "two", rounds=3, resume=True)
    assert losses(third) == losses(second)
    finals = [
        {n: DirectoryStore(tmp_path / f / n).load("final") for n in NAMES}
        for f in ("one", "two")
    ]
    assert_equal(*finals)


def test_a_new_start_aligns_anew(tmp_path: Path) -> None:
    _, before = start(tmp_path)
    _, after = start(tmp_path)
    assert any(
        not torch.equal(before[name].row_index.local, after[name].row_index.local)
        for name in NAMES
    )


def test_resuming_without_a_common_alignment_is_an_error(tmp_path: Path) -> None:
    start(tmp_path / "one")
    start(tmp_path / "two")
    file = tmp_path / "one" / "passive-2" / "alignment.pt"
    file.unlink()
    with pytest.raises(PartyError, match="'passive-2': has saved no alignment"):
        start(tmp_path / "one", resume=True)
    shutil.copy(tmp_path / "two" / "passive-2" / "alignment.pt", file)
    with pytest.raises(PartyError, match="'passive-2': has saved another alignment"):
        start(tmp_path / "one", resume=True)


def test_resuming_with_another_method_is_an_error(tmp_path: Path) -> None:
    start(tmp_path)
    for changed in ({"method": "psi"}, {"padding": 1}, {"group": "modp2048"}):
        with pytest.raises(PartyError, match="made with another method, group"):
            start(tmp_path, resume=True, **changed)


def test_a_checkpoint_of_another_alignment_is_refused(tmp_path: Path) -> None:
    """A newer run has aligned anew and ended before its first checkpoint."""
    start(tmp_path)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "strategy", kept)
    start(tmp_path, checkpoints=Checkpoints(folder=tmp_path))
    with pytest.raises(ConfigError, match="no checkpoint"):  # of the newer run
        start(tmp_path, resume=True)
    shutil.rmtree(tmp_path / "strategy")
    kept.rename(tmp_path / "strategy")
    with pytest.raises(PartyError, match=r"its alignment was .* now"):
        start(tmp_path, resume=True)


def test_a_party_that_lost_its_memory_comes_back_to_its_rows(tmp_path: Path) -> None:
    strategy = make_strategy(checkpoints=Checkpoints(every=1))
    inner = InProcessGrid(make_app(), 3, {"state-dir": str(tmp_path)})
    stages: list[str] = []
    steps = {"forward": 0}

    def forget_once(message: Message) -> None:
        kind = message.metadata.message_type
        if kind == Verb.ALIGN:
            stages.append(read(message).text("stage"))
        steps["forward"] += kind == Verb.FORWARD
        if steps["forward"] == 4 and message.metadata.dst_node_id == 3:
            steps["forward"] += 1
            replay.sessions.pop((inner.run.run_id, 3))

    result = strategy.start(HookedGrid(inner, forget_once), num_rounds=2)
    assert set(losses(result)) == {1, 2}
    assert stages.count("begin") == 3
    assert stages.count("apply") == 6  # once after the handshake, once when it was back


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda count: -1, marks=pytest.mark.extra),
        lambda count: count % 2,
    ],
)
def test_a_second_start_on_the_same_nodes(choose: Callable[[int], int]) -> None:
    grid = StatelessGrid(make_app(), 3, {}, choose)
    make_strategy(relay_bytes=4000).start(grid, num_rounds=1)
    one = [alignment_of(grid, node).fingerprint for node in grid.contexts]
    result = make_strategy(relay_bytes=4000).start(grid, num_rounds=1)
    two = [alignment_of(grid, node).fingerprint for node in grid.contexts]
    assert len({*one}) == len({*two}) == 1
    assert one != two
    assert set(losses(result)) == {1}
    assert not secrets_of(grid)
