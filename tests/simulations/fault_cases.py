"""What the tests of deployments and faults share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vertical_cases import assert_equal

from flower_vfl import InProcessGrid
from flower_vfl.checkpoints import DirectoryStore
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.deployment import PartySpec

Settings = Mapping[str, str | int | float | bool]
SETTINGS: Settings = {"id-column": "id", "label-column": "label", "parties": 2}


def wait_until(done: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait for something to become true; fail the test if it does not."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.02)


def final_states(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what each party kept at the end: model, optimizer, random state, step."""
    return {
        name: DirectoryStore(folder / name).load("final")
        for name, folder in folders.items()
    }


def undisturbed(
    parties: Sequence[PartySpec], settings: Settings, folder: Path
) -> dict[str, dict[str, Any]]:
    """Train with the same settings in this process and return the final states."""
    config = RunConfig.from_run_config(
        {**settings, "state-dir": str(folder), "out": str(folder / "result")}
    )
    nodes = [
        {"role": party.role, "name": party.name, "data": str(party.data)}
        for party in parties
    ]
    with InProcessGrid(client_app, nodes, config.to_run_config()) as grid:
        train(grid, config, "in-process", progress=False)
    return final_states({party.name: folder for party in parties})


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the final states of all parties to the last bit."""
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert state["step"] > 0
        assert_equal(found[name], state)


def processes_below(folder: Path) -> dict[int, str]:
    """Return the living processes whose Flower home lies in a folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes()
            if b"FLWR_HOME=" + os.fsencode(folder) in environment:
                found[int(entry.name)] = (entry / "comm").read_text().strip()
        except (OSError, ValueError):  # gone, of somebody else, or not a process
            continue
    return found
