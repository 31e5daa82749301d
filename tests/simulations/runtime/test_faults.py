"""Connections that break, parties that stay away, and Ctrl-C: with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from logging import INFO
from pathlib import Path
from typing import Any

import pytest
from cli_cases import training_losses
from fault_cases import (
    SETTINGS,
    Settings,
    assert_same,
    final_states,
    newest_step,
    undisturbed,
    wait_until,
)
from flwr.common.constant import SUPERLINK_NODE_ID
from process_grid import ProcessGrid, claim_identity
from resident_cases import Proxy

from flower_vfl import PartyError
from flower_vfl.protocol.messages import Content, Verb
from flower_vfl.simulations.app import resident_grid, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.deployment import (
    PartySpec,
    make_server_files,
    write_party_files,
)
from flower_vfl.simulations.results import load_result
from flower_vfl.strategies.messenger import Messenger

pytestmark = [pytest.mark.slow]
FAULTY: Settings = {
    **SETTINGS,
    "epochs": 8,
    "batch-size": 16,
    "bottom": "mlp:hidden=16,dropout=0.2",
    "checkpoint-every": 10,
}
STEPS = 29  # of an epoch: 455 training rows in batches of 16


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> list[PartySpec]:
    return write_party_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def expected(
    parties: list[PartySpec], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    return undisturbed(parties, FAULTY, tmp_path_factory.mktemp("expected"))


class Trial:
    """One training over processes, in a thread, with a proxy in front of the server."""

    def __init__(self, parties: list[PartySpec], folder: Path, **settings: Any) -> None:
        tls = make_server_files(folder / "tls", ["127.0.0.1"])
        self.folder = folder
        self.proxy = Proxy()
        self.config = RunConfig.from_run_config(
            {
                **FAULTY,
                "address": self.proxy.behind,
                "advertise": self.proxy.address,
                "certificate": str(tls.certificate),
                "private-key": str(tls.key),
                "root-certificate": str(tls.authority),
                "state-dir": str(folder),
                "out": str(folder / "result"),
                **settings,
            }
        )
        nodes = [{"role": p.role, "name": p.name, "data": str(p.data)} for p in parties]
        self.plain = ProcessGrid(nodes, self.config.to_run_config())
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        try:
            with resident_grid(self.plain, self.config) as grid:
                grid.open(timeout=180.0)  # processes start slowly on a busy machine
                train(grid, self.config, "processes", progress=False)
        except BaseException as error:
            self.error = error

    def run(self, *faults: Callable[[], object]) -> None:
        """Train; the faults happen in the middle of the third, the sixth ... epoch."""
        self._thread.start()
        for number, fault in enumerate(faults):
            step = (3 * number + 2) * STEPS
            wait_until(lambda step=step: self._is_past(step), f"step {step}")
            assert self.error is None
            fault()
        self._thread.join(180)
        assert not self._thread.is_alive()

    def _is_past(self, step: int) -> bool:
        return self.error is not None or newest_step(self.folder / "bank") > step

    def stop(self) -> None:
        self.proxy.stop()
        self.plain.stop()

    def states(self) -> dict[str, dict[str, Any]]:
        return final_states(dict.fromkeys(("bank", "shop", "telco"), self.folder))


@pytest.fixture
def trial(
    parties: list[PartySpec], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Trial]:
    claim_identity(SUPERLINK_NODE_ID)
    made = Trial(parties, tmp_path, **request.param)
    yield made
    made.stop()


@pytest.mark.parametrize("trial", [{"silence": 5.0, "timeout": 60.0}], indirect=True)
def test_a_cut_costs_no_step_and_a_death_those_since_the_checkpoint(
    trial: Trial, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def cut() -> None:
        trial.proxy.closed = True
        trial.proxy.cut()
        threading.Timer(1.0, setattr, (trial.proxy, "closed", False)).start()

    def kill() -> None:
        assert caplog.text.count("lost its connection") == 3
        assert trial.proxy.made == 6, "each party connected twice"
        assert "resumed after" not in caplog.text, "nobody was sent back"
        trial.plain.kill("shop")
        # It is back after the server has given the session up and found it offline.
        threading.Timer(7.0, trial.plain.revive, ("shop",)).start()

    with caplog.at_level(INFO, "flwr"):
        trial.run(cut, kill)
    assert trial.error is None
    assert "party 'shop'" in caplog.text
    assert caplog.text.count("resumed after step") == 1
    assert_same(trial.states(), expected)


@pytest.mark.parametrize("trial", [{"silence": 1.0, "timeout": 10.0}], indirect=True)
def test_a_party_that_stays_away_ends_the_run_with_its_name(
    trial: Trial, expected: dict[str, Any], parties: list[PartySpec]
) -> None:
    trial.run(lambda: trial.plain.kill("telco"))
    assert isinstance(trial.error, PartyError)
    assert trial.error.party == "telco"
    assert trial.error.step is not None
    assert "offline" in str(trial.error)
    step = newest_step(trial.folder / "telco")
    note = f"The newest checkpoint is of step {step}: start with resume=True."
    assert note in trial.error.__notes__

    resumed = undisturbed(parties, {**FAULTY, "resume": True}, trial.folder)
    assert_same(resumed, expected)


def test_an_offline_node_is_named_with_flowers_own_messages_too() -> None:
    claim_identity(SUPERLINK_NODE_ID)
    grid = ProcessGrid([{"name": "bank"}, {"name": "shop"}], {})
    for name in ("bank", "shop"):
        grid.take_offline(name)
    messenger = Messenger(grid, timeout=1.0, retries=1)
    messenger.nodes = {"shop": grid.node("shop")}
    with pytest.raises(PartyError, match=r"party 'shop'.*Node Unavailable"):
        messenger.ask(Verb.HELLO, {"shop": Content()})


def test_ctrl_c_leaves_a_checkpoint_to_resume_from(
    parties: list[PartySpec], tmp_path: Path
) -> None:
    files = {party.name: str(party.data) for party in parties}
    program = "from flower_vfl.simulations.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--json"]
    command += ["--label-party", files["bank"], "--label-column", "label"]
    command += ["--passive", files["shop"], "--passive", files["telco"]]
    command += ["--epochs", "15", "--batch-size", "16", "--checkpoint-every", "10"]

    def start(folder: str, *more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, "--out", str(tmp_path / folder), *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    label = tmp_path / "ours" / "parties" / "label"
    started = [start("calm"), start("ours")]
    calm, ours = started
    try:
        wait_until(lambda: newest_step(label) > STEPS, "the second epoch")
        ours.send_signal(signal.SIGINT)
        _, said = ours.communicate(timeout=60)
        assert ours.returncode == 130
        assert said.startswith(b"flower-vfl: interrupted; the same command with --res")
        step = newest_step(label)
        assert STEPS < step < 15 * STEPS
        assert not (tmp_path / "ours" / "result.json").exists()
        again = start("ours", "--resume")
        started.append(again)
        _, said = again.communicate(timeout=120)
        assert again.returncode == 0, said
        assert calm.wait(120) == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()
    names = ("label", "passive-1", "passive-2")
    found, expected = (
        final_states(dict.fromkeys(names, tmp_path / folder / "parties"))
        for folder in ("ours", "calm")
    )
    assert_same(found, expected)
    results = [load_result(tmp_path / folder) for folder in ("ours", "calm")]
    losses = [training_losses(result) for result in results]
    assert losses[0] == losses[1] and len(losses[0]) == 15
