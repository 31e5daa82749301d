"""Connections that break, parties that stay away, and Ctrl-C: with real processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from logging import INFO
from pathlib import Path
from typing import Any

import pytest
from cli_cases import call, training_losses
from fault_cases import (
    SETTINGS,
    Settings,
    assert_same,
    final_states,
    newest_step,
    node_config,
    undisturbed,
    wait_until,
)
from flwr.common.constant import SUPERLINK_NODE_ID
from process_grid import ProcessGrid, claim_identity, flower_vfl_command
from resident_cases import Proxy

from flower_vfl import PartyError
from flower_vfl.protocol.messages import Content, Verb
from flower_vfl.simulations.app import resident_grid, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.deployment.cluster import (
    PartySpec,
    make_server_files,
    write_party_files,
)
from flower_vfl.simulations.results import load_result
from flower_vfl.strategies.messenger import Messenger

pytestmark = [pytest.mark.slow, pytest.mark.long]
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
        nodes = [node_config(party) for party in parties]
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


@pytest.mark.parametrize("trial", [{"silence": 4.0, "timeout": 60.0}], indirect=True)
def test_a_cut_costs_no_step_and_a_death_those_since_the_checkpoint(
    trial: Trial, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def cut() -> None:
        trial.proxy.closed = True
        trial.proxy.cut()
        threading.Timer(0.5, setattr, (trial.proxy, "closed", False)).start()

    def kill() -> None:
        assert caplog.text.count("lost its connection") == 3
        assert trial.proxy.made == 6, "each party connected twice"
        assert "resumed after" not in caplog.text, "nobody was sent back"
        # It is back after the server has given the session up and found it offline.
        trial.plain.kill("shop", until_found_offline=True)

    with caplog.at_level(INFO, "flwr"):
        trial.run(cut, kill)
    assert trial.error is None
    assert "party 'shop'" in caplog.text
    assert caplog.text.count("resumed after step") == 1
    assert_same(trial.states(), expected)


@pytest.mark.parametrize("trial", [{"silence": 1.0, "timeout": 6.0}], indirect=True)
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
    parties: list[PartySpec],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {party.name: str(party.data) for party in parties}
    words = ["run", "--json", "--label-party", files["bank"], "--label-column", "label"]
    words += ["--passive", files["shop"], "--passive", files["telco"]]
    words += ["--epochs", "10", "--batch-size", "16", "--checkpoint-every", "10"]
    here, there = tmp_path / "here", tmp_path / "there"
    errors = tmp_path / "errors.txt"
    process = flower_vfl_command([*words, "--out", str(there)], errors)
    label = there / "parties" / "label"
    try:
        wait_until(lambda: newest_step(label) > STEPS, "the second epoch")
        os.kill(process.pid, signal.SIGINT)
        process.join(180)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 130
    said = errors.read_text()
    assert said.startswith("flower-vfl: interrupted; the same command with --res")
    step = newest_step(label)
    assert STEPS < step < 10 * STEPS
    assert not (there / "result.json").exists()
    for more in (["--out", str(there), "--resume"], ["--out", str(here)]):
        code, _, complaint = call(capsys, monkeypatch, *words, *more)
        assert code == 0, complaint
    names = ("label", "passive-1", "passive-2")
    found, expected = (
        final_states(dict.fromkeys(names, folder / "parties"))
        for folder in (there, here)
    )
    assert_same(found, expected)
    losses = [training_losses(load_result(folder)) for folder in (there, here)]
    assert losses[0] == losses[1] and len(losses[0]) == 10
