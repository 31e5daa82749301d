"""What the tests of deployments and faults share."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vertical_cases import assert_equal

from flower_vfl import InProcessGrid
from flower_vfl.parties.checkpoints import DirectoryStore, tagged_step
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.deployment.cluster import Cluster, PartySpec

Settings = Mapping[str, str | int | float | bool]
SETTINGS: Settings = {"id-column": "id", "label-column": "label", "parties": 2}


def wait_until(done: Callable[[], object], what: str, seconds: float = 180.0) -> None:
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


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a party's folder."""
    steps = (tagged_step(path.stem) for path in folder.glob("step-*.pt"))
    return max((step for step in steps if step is not None), default=-1)


class Follower:
    """Collects the log of a run while the test does something else."""

    def __init__(self, cluster: Cluster, run_id: int) -> None:
        self.lines: list[str] = []
        arguments = (run_id, self.lines.append)
        self._thread = threading.Thread(
            target=cluster.follow, args=arguments, daemon=True
        )
        self._thread.start()

    def wait(self, seconds: float = 180.0) -> None:
        """Wait for the end of the run."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "\n".join(self.lines[-20:])

    def resumed(self) -> list[int]:
        """Return the steps at which the run was taken up again."""
        found = re.findall(r"resumed after step (\d+)", "\n".join(self.lines))
        return [int(step) for step in found]


def node_config(party: PartySpec) -> dict[str, Any]:
    """Return the node config of a party; a label party that runs the server."""
    own = {"role": party.role, "name": party.name, "data": str(party.data)}
    return {**own, "trust-server": True} if party.role == "label" else own


def undisturbed(
    parties: Sequence[PartySpec], settings: Settings, folder: Path
) -> dict[str, dict[str, Any]]:
    """Train with the same settings in this process and return the final states."""
    config = RunConfig.from_run_config(
        {**settings, "state-dir": str(folder), "out": str(folder / "result")}
    )
    nodes = [node_config(party) for party in parties]
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
