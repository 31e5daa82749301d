"""Processes killed, connections cut and bits flipped at random; then the run goes on.

    python benchmarks/faults.py --engine ray --cases 20
    python benchmarks/faults.py --engine deployment --cases 20
    python benchmarks/faults.py --engine files --flips 25

Each case is a small training that is disturbed at a random moment: a client's process
or the server's is killed with SIGKILL, or the connections of all parties are cut three
times. A run that ends with an error is resumed, as its user would. ``files`` flips one
bit of one checkpoint file of a run that was interrupted, and resumes it. Final weights,
optimizer and random states of all parties and the history of the result are compared
with a run that nobody disturbed. A case that ends with other weights or another history
and with no word about it is "silently different"; the script then exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import psutil
from fault_cases import SETTINGS, Follower, final_states, newest_step, wait_until
from resident_cases import Proxy
from vertical_cases import assert_equal

from flower_vfl.errors import VerticalError
from flower_vfl.simulations.cli.main import main as command
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.deployment.cluster import Cluster, write_party_files
from flower_vfl.simulations.results import load_result, table
from flower_vfl.simulations.runtime.engines import run_in_process
from flower_vfl.simulations.runtime.flower_runtime import CONNECTION, run_app
from flower_vfl.strategies.training import Training

APP = Path(__file__).parents[1] / "simulations" / "label_leakage"
RUN = {
    "epochs": 10,
    "batch-size": 16,
    "bottom": "mlp:hidden=16,dropout=0.2",
    "attack": "norm",
    "valid-fraction": 0.1,
    "patience": 8,
    "checkpoint-every": 5,
}
STEPS = 220  # of the run, which stops early after a few more
SOON = {"silence": 3.0, "timeout": 60.0}
EQUAL, REFUSED, SILENT = "bit-equal", "refused with a line", "silently different"
UNTIMED = "metric not in ('seconds', 'bytes', 'steps', 'defense_seconds') and epoch > 0"
NAMES = ("label", "passive-1", "passive-2")
Found = tuple[dict[str, Any], Any]


def found_in(folders: Mapping[str, Path], result: Path) -> Found:
    """Return the final states of all parties, and the history without its times."""
    document = load_result(result)
    history = table(document).query(UNTIMED).reset_index(drop=True)
    return final_states(folders), (history, document["stopped"])


def judge(found: Found, expected: Found) -> str:
    """Return what became of a case."""
    try:
        assert_equal(found[0], expected[0])
        history, stopped = expected[1]
        assert found[1][0].equals(history) and found[1][1] == stopped
    except AssertionError:
        return SILENT
    return EQUAL


class Table:
    """Counts outcomes by row."""

    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = {}

    def add(self, row: str, outcome: str, said: str) -> None:
        """Count a case, and say what became of it."""
        self.rows.setdefault(row, Counter())[outcome] += 1
        number = self.rows[row].total()
        print(f"{row} {number}: {outcome}{'; ' if said else ''}{said}", flush=True)

    def show(self) -> None:
        """Print all rows; exit with 1 if a case was silently different."""
        heads = ("cases", EQUAL, REFUSED, SILENT)
        print(f"{'':28}" + "".join(f"{head:>21}" for head in heads))
        for row, counts in self.rows.items():
            cells = (counts.total(), *(counts[head] for head in heads[1:]))
            print(f"{row:28}" + "".join(f"{cell:21}" for cell in cells))
        if any(counts[SILENT] for counts in self.rows.values()):
            sys.exit(1)


def at_step(step: int, label: Path, over: Callable[[], bool], chance: float) -> None:
    """Wait for a checkpoint of a step or of a later one, and a little longer."""
    wait_until(lambda: over() or newest_step(label) >= step, f"step {step}", 300)
    time.sleep(chance)


def cuts(proxy: Proxy, chance: random.Random) -> str:
    """Cut all connections three times, and refuse new ones for a moment."""
    for _ in range(3):
        proxy.closed = True
        proxy.cut()
        time.sleep(chance.uniform(0.0, 1.0))
        proxy.closed = False
        time.sleep(chance.uniform(0.0, 0.5))
    return "cut"


def kill(words: str) -> str:
    """Kill one of the processes below this one whose command has some words."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if words in " ".join(process.cmdline()):
                found.append(process.pid)
    if not found:
        return "nothing left to kill"
    os.kill(random.choice(found), signal.SIGKILL)
    return "killed"


# --- Ray ---------------------------------------------------------------------------


def under_ray(cases: int, kinds: list[str], chance: random.Random, into: Table) -> None:
    """Disturb simulations under ``flwr run``."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**RUN, **SOON, "reproducible-noise": True}
        expected = alone(Path(folder) / "expected", settings)
        for kind in kinds:
            for number in range(cases):
                own = Path(folder) / f"{kind}-{number}"
                said = disturbed_simulation(own, settings, kind, chance)
                states = dict.fromkeys(NAMES, own)
                outcome = judge(found_in(states, own), expected)
                into.add(f"ray: {kind}", outcome, said)


def alone(folder: Path, settings: Mapping[str, Any]) -> Found:
    """Run undisturbed, in this process."""
    run_in_process(configured(settings, folder), verbose=False, bar=False)
    return found_in(dict.fromkeys(NAMES, folder), folder)


def configured(settings: Mapping[str, Any], folder: Path, **more: Any) -> RunConfig:
    """Return the settings of a run in a folder."""
    places = {"state-dir": str(folder), "out": str(folder)}
    return RunConfig.from_run_config({**settings, **places, **more})


def disturbed_simulation(
    folder: Path, settings: Mapping[str, Any], kind: str, chance: random.Random
) -> str:
    """Run and disturb a simulation, resume it if it failed; return the first error."""
    proxy, errors = Proxy(), []
    reached = {"address": proxy.behind, "advertise": proxy.address}

    def train(resume: bool) -> None:
        config = configured(settings, folder, resume=resume, **reached)
        try:
            run_app(APP, run_config=config.to_run_config(), nodes=3, timeout=240)
        except VerticalError as error:
            errors.append(str(error))

    thread = threading.Thread(target=train, args=(False,))
    thread.start()
    step = chance.randrange(STEPS)
    over = lambda: not thread.is_alive()  # noqa: E731
    at_step(step, folder / "label", over, chance.uniform(0.0, 0.2))
    if kind == "connection":
        done = cuts(proxy, chance)
    else:
        done = kill("ray::ClientAppActor" if kind == "client" else "flwr-simulation")
    thread.join()
    said = f"{done} at step {step}, " + ("resumed" if errors else "went on by itself")
    if errors:
        train(True)
        if len(errors) > 1:
            raise RuntimeError(errors[-1])
    proxy.stop()
    return said


# --- deployment --------------------------------------------------------------------


def deployed(cases: int, kinds: list[str], chance: random.Random, into: Table) -> None:
    """Disturb runs between SuperNodes."""
    with tempfile.TemporaryDirectory(prefix="vfl-") as name:
        folder = Path(name)
        parties = write_party_files(folder)
        with Cluster(folder, parties, say=lambda line: None) as cluster:
            settings = {**SETTINGS, **RUN, **SOON}
            expected = undisturbed_deployment(cluster, settings)
            for kind in kinds:
                for _ in range(cases):
                    said = disturbed_deployment(cluster, settings, kind, chance)
                    outcome = judge(deployment(cluster), expected)
                    into.add(f"deployment: {kind}", outcome, said)


def deployment(cluster: Cluster) -> Found:
    """Return what a run in a deployment left."""
    states = {name: cluster.state_dir(name) for name in cluster.parties}
    return found_in(states, cluster.server / "result")


def submitted(cluster: Cluster, settings: Mapping[str, Any], resume: bool) -> int:
    """Submit a run; a new one finds nothing of the one before."""
    places = {"state-dir": cluster.server / "state", "out": cluster.server / "result"}
    if not resume:
        for path in (*places.values(), *map(cluster.state_dir, cluster.parties)):
            shutil.rmtree(path, ignore_errors=True)
    texts = {name: str(path) for name, path in places.items()}
    return cluster.submit({**settings, **texts, "resume": resume})


def undisturbed_deployment(cluster: Cluster, settings: Mapping[str, Any]) -> Found:
    """Run to the end."""
    Follower(cluster, submitted(cluster, settings, resume=False)).wait()
    return deployment(cluster)


def disturbed_deployment(
    cluster: Cluster, settings: Mapping[str, Any], kind: str, chance: random.Random
) -> str:
    """Run and disturb a deployment, resume it if it failed; return what happened."""
    proxy = Proxy()
    reached = {"address": proxy.behind, "advertise": proxy.address}
    run_id = submitted(cluster, {**settings, **reached}, resume=False)
    log = Follower(cluster, run_id)
    step = chance.randrange(STEPS)
    over = lambda: cluster_result(cluster)  # noqa: E731
    label = cluster.state_dir("bank") / "bank"
    at_step(step, label, over, chance.uniform(0.0, 0.2))
    if kind == "connection":
        done = cuts(proxy, chance)
    elif kind == "server":
        done = kill("flwr-serverapp")
        stopping = cluster.runtime.start(["flwr", "stop", str(run_id), CONNECTION])
        stopping.communicate(timeout=60)
    else:
        party = chance.choice(list(cluster.parties))
        done = kill_client(cluster, party)
        cluster.stop_party(party)  # Flower would notice after a minute
        cluster.start_party(party)
    log.wait(300)
    said = f"{done} at step {step}, went on by itself"
    if not cluster_result(cluster):
        said = f"{done} at step {step}, resumed"
        again = submitted(cluster, {**settings, **reached}, resume=True)
        Follower(cluster, again).wait(300)
    proxy.stop()
    return said


def cluster_result(cluster: Cluster) -> bool:
    """Return whether the run has ended well."""
    return (cluster.server / "result" / "result.json").exists()


def kill_client(cluster: Cluster, party: str) -> str:
    """Kill the process of a party's ClientApp."""
    done = "nothing left to kill"
    for process in psutil.Process(cluster.processes[party].pid).children(True):
        with contextlib.suppress(psutil.Error):
            if "flwr-clientapp" in " ".join(process.cmdline()):
                process.kill()
                done = f"{party} killed"
    return done


# --- files -------------------------------------------------------------------------


class Interrupted(BaseException):
    """Ends a run as SIGKILL would: nothing is written after it."""


def flipped(flips: int, chance: random.Random, into: Table) -> None:
    """Flip one bit in a file of an interrupted run, and resume it."""
    words = ["run", "--json", "--model", RUN["bottom"], "--attack", "norm"]
    words += ["--epochs", "4", "--batch-size", "64", "--checkpoint-every", "3"]
    words += ["--valid-fraction", "0.1", "--patience", "3", "--limit", "300"]
    aligned = ["--alignment", "psu", "--absent-features", "0.2"]
    with tempfile.TemporaryDirectory() as name:
        for kind, place, more in (
            ("party's", "parties/[lp]*/step-*", []),
            ("strategy's", "parties/strategy/step-*", []),
            ("alignment's", "parties/[lp]*/*align*", aligned),
        ):
            folder = Path(name) / kind[:5]
            half, case = folder / "half", folder / "case"
            with stopping_at(11), contextlib.suppress(Interrupted):
                called([*words, *more, "--out", str(half)])
            whole = [*words, *more, "--out", str(folder / "whole")]
            if more:  # each handshake finds another order of the ids
                shutil.copytree(half, folder / "whole")
                whole.append("--resume")
            called(whole)
            expected = of_command(folder / "whole")
            for _ in range(flips):
                shutil.rmtree(case, ignore_errors=True)
                shutil.copytree(half, case)
                path = chance.choice(sorted(case.glob(place)))
                content = bytearray(path.read_bytes())
                bit = chance.randrange(8 * len(content))
                content[bit // 8] ^= 1 << bit % 8
                path.write_bytes(content)
                code, said = called([*words, *more, "--out", str(case), "--resume"])
                outcome = REFUSED if code and "Traceback" not in said else SILENT
                if code == 0:
                    outcome = judge(of_command(case), expected)
                into.add(f"bit flip, {kind}", outcome, said.strip()[:200])


def of_command(folder: Path) -> Found:
    """Return what a run of the command left."""
    return found_in(dict.fromkeys(NAMES, folder / "parties"), folder)


def called(words: list[str]) -> tuple[int, str]:
    """Call the command; return its exit code and what it said."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["flower-vfl", *words]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        try:
            command()
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


@contextlib.contextmanager
def stopping_at(step: int) -> Iterator[None]:
    """End training before a step."""
    whole = Training.step

    def stopped(self: Training, epoch: int, index: int) -> Any:
        if self.state.step == step:
            raise Interrupted
        return whole(self, epoch, index)

    with mock.patch.object(Training, "step", stopped):
        yield


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("ray", "deployment", "files", "all"))
    parser.add_argument("--cases", type=int, default=20, help="of each kind")
    parser.add_argument("--flips", type=int, default=25, help="of each kind of file")
    parser.add_argument("--kinds", default="client,server,connection")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    engine, kinds, into = given.engine or "all", given.kinds.split(","), Table()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    chance = random.Random(given.seed)
    if engine in ("files", "all"):
        flipped(given.flips, chance, into)
    if engine in ("ray", "all"):
        under_ray(given.cases, kinds, chance, into)
    if engine in ("deployment", "all"):
        deployed(given.cases, kinds, chance, into)
    into.show()


if __name__ == "__main__":
    main()
