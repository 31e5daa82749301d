"""A deployment of separate processes with TLS and keys, and what kills them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import (
    SETTINGS,
    Follower,
    assert_same,
    final_states,
    newest_step,
    processes_below,
    undisturbed,
    wait_until,
)

from flower_vfl.simulations.deployment.cluster import (
    Cluster,
    make_key_pair,
    write_party_files,
)
from flower_vfl.simulations.results import load_result, table
from flower_vfl.simulations.runtime.flower_runtime import CONNECTION
from flower_vfl.simulations.runtime.process_reaper import session_members

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
    ),
]
STEPS = 29  # of an epoch: 455 training rows in batches of 16


Command = tuple[subprocess.Popen[str], Path]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, write_party_files(tmp_path)) as made:
        yield made
    assert processes_below(tmp_path) == {}


def start_command(folder: Path, epochs: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "flower_vfl.simulations.deployment"]
    words += ["--epochs", str(epochs), "--keep", str(folder)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module", autouse=True)
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Start the command; it mostly waits, so other tests run beside it."""
    folder = tmp_path_factory.mktemp("command") / "kept"
    process = start_command(folder, 5)
    yield process, folder
    process.terminate()
    process.communicate()
    assert processes_below(folder) == {}


@pytest.mark.extra
def test_killed_processes_cost_nothing_but_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A party's process dies, later the server's; the weights do not show it."""
    settings = {
        **SETTINGS,
        "epochs": 30,
        "batch-size": 16,
        "bottom": "mlp:hidden=16,dropout=0.2",
        "checkpoint-every": 10,
        "silence": 4.0,
        "timeout": 60.0,
        "state-dir": str(cluster.server / "state"),
        "out": str(cluster.server / "result"),
    }
    first = cluster.submit(settings)
    log = Follower(cluster, first)
    wait_for_step(cluster, 3 * STEPS + 1)
    kill(cluster, "shop", "flwr-clientapp")
    # Its SuperNode would notice by itself, but Flower takes up to a minute for that.
    cluster.stop_party("shop")
    cluster.start_party("shop")
    wait_until(log.resumed, "everyone goes back to a common step")
    [step] = log.resumed()
    assert 3 * STEPS - 10 < step < 12 * STEPS
    wait_for_step(cluster, 12 * STEPS + 1)
    kill(cluster, "superexec", "flwr-serverapp")
    assert not (cluster.server / "result" / "result.json").exists()

    stopping = cluster.runtime.start(["flwr", "stop", str(first), CONNECTION])
    said, _ = stopping.communicate(timeout=180)
    assert stopping.returncode == 0, said
    second = cluster.submit({**settings, "resume": True})
    log = Follower(cluster, second)
    log.wait()
    assert cluster.status(second) == ("finished:completed", "N/A")
    [step] = log.resumed()
    assert 12 * STEPS < step < 30 * STEPS
    losses = table(load_result(cluster.server / "result")).query(
        "metric == 'loss' and split == 'train'"
    )
    assert losses["epoch"].tolist() == list(range(1, 31))

    parties = list(cluster.parties.values())
    found = final_states({p.name: cluster.state_dir(p.name) for p in parties})
    assert_same(found, undisturbed(parties, settings, tmp_path / "expected"))
    assert_an_unregistered_key_is_refused(cluster)


@pytest.mark.long
def test_the_command_trains_over_three_organisations(
    command: Command, tmp_path: Path
) -> None:
    process, folder = command
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert processes_below(folder) == {}
    document = load_result(folder / "server" / "result")
    assert f"test auc: {document['final']['test_auc']:.4f}" in said
    assert document["final"]["test_auc"] > 0.95
    assert (document["engine"], document["config"]["dataset"]) == ("deployment", "")
    assert document["parties"] == dict.fromkeys(("bank", "shop", "telco"), 569)

    parties = write_party_files(tmp_path / "again")  # the same files
    names = [party.name for party in parties]
    headers = {n: (folder / n / f"{n}.csv").open().readline() for n in names}
    assert [n for n in names if "label" in headers[n].split(",")] == ["bank"]
    found = final_states({n: folder / n / "state" for n in names})
    settings = {**SETTINGS, "epochs": 5, "batch-size": 32}
    assert_same(found, undisturbed(parties, settings, tmp_path / "expected"))
    for name in names:  # nothing of a party lies with another one, or with the server
        assert [f.name for f in (folder / name / "state").iterdir()] == [name]
    assert {f.name for f in (folder / "server" / "state").iterdir()} == {"strategy"}


@pytest.mark.extra
def test_a_terminated_deployment_leaves_no_process(tmp_path: Path) -> None:
    process = start_command(tmp_path, 10**6)
    try:

        def training() -> bool:
            return newest_step(tmp_path / "bank" / "state" / "bank") >= 0

        wait_until(lambda: training() or process.poll() is not None, "training")
        names = set(processes_below(tmp_path).values())
        assert {"flower-superlin", "flwr-serverapp", "flwr-clientapp"} <= names
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=400)
    assert process.returncode == 130, said
    assert "every process was stopped" in said
    assert processes_below(tmp_path) == {}


def wait_for_step(cluster: Cluster, step: int) -> None:
    """Wait until a checkpoint is in the middle of an epoch, after a step."""
    folder = cluster.state_dir("bank") / "bank"
    wait_until(lambda: newest_step(folder) >= step, f"step {step}")


def kill(cluster: Cluster, name: str, program: str) -> None:
    """Kill the process that runs the ClientApp or the ServerApp."""
    found = []
    for pid in session_members({cluster.processes[name].pid}):
        shown = subprocess.run(
            ["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True
        ).stdout
        if any(Path(word).name == program for word in shown.split()[:3]):
            found.append(pid)
    [pid] = found
    os.kill(pid, signal.SIGKILL)


def assert_an_unregistered_key_is_refused(cluster: Cluster) -> None:
    """Start a SuperNode with a key that nobody registered."""
    cluster.stop_party("telco")
    before = len(cluster.log("telco"))
    make_key_pair(cluster.folder / "telco" / "keys", "telco")
    cluster.start_party("telco")
    wait_until(lambda: not cluster.is_running("telco"), "the SuperNode is refused")
    assert "Failed to activate SuperNode" in cluster.log("telco")[before:]
    assert "No SuperNode found with the given public key" in cluster.log("superlink")
