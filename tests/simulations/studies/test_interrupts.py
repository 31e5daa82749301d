"""Ctrl-C ends a whole study at any moment, with code 130 and a line about it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import call
from fault_cases import wait_until
from process_grid import flower_vfl_command
from study_cases import document_of

from flower_vfl.errors import PartyError
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.studies import trials as trials_module
from flower_vfl.strategies.state import interruptible
from flower_vfl.strategies.training import Training


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    """Take signals as in a terminal, also where a shell runs the tests behind it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SWEEP = ("sweep", "--limit", "120", "--epochs", "1", "--set", "seed=0,1,2")
LINE = "flower-vfl: interrupted; {} of 3 runs are finished in {}; run the same"
LONG = ("sweep", "--limit", "300", "--epochs", "6", "--set", "seed=0,1,2,3,4,5")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def finished(folder: Path) -> int:
    return len(list(folder.glob("runs/*/result.json")))


def press_in_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Training._finish

    def pressed(self: Training) -> None:
        press()
        finish(self)

    monkeypatch.setattr(Training, "_finish", pressed)


def press_beside_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(self: Training, epoch: int, index: int) -> Any:
        press()
        raise PartyError("passive-1", "it is gone", "Start it again", step=1)

    monkeypatch.setattr(Training, "step", pressed)


def press_where_it_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(config: RunConfig, engine: str) -> tuple[Any, dict[str, bytes]]:
        try:  # as Python does in a finaliser
            press()
        except KeyboardInterrupt:
            return document_of(config), {}
        raise AssertionError("the signal must be raised at once")

    monkeypatch.setattr(trials_module, "run_trial", pressed)


@pytest.mark.parametrize(
    ("moment", "kept"),
    [
        (press_in_the_last_step, 0),
        (press_beside_an_error, 0),
        (press_where_it_is_swallowed, 1),
    ],
)
def test_a_signal_in_a_run_ends_the_sweep(
    moment: Any,
    kept: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        moment(patched)
        words = (*SWEEP, "--out", str(tmp_path))
        code, shown, said = call(capsys, patched, *words)
    assert (code, shown) == (130, "")
    assert said.startswith(LINE.format(kept, tmp_path)), said
    assert finished(tmp_path) == kept
    assert json.loads((tmp_path / "study.json").read_text())["errors"] == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_the_first_signal_waits_for_the_end_of_a_step() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible() as interrupted:
        press()
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            press()


def interrupt(folder: Path, seconds: float) -> tuple[int, str]:
    """Start a sweep, interrupt it after a while; return its code and its words."""
    errors = folder.with_suffix(".errors")
    process = flower_vfl_command([*LONG, "--json", "--out", str(folder)], errors)
    try:
        wait_until((folder / "study.json").exists, "the study begins")
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGINT)
        process.join(180)
    finally:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode, errors.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments", [1, pytest.param(20, marks=pytest.mark.extra)], ids=str
)
def test_a_sweep_ends_wherever_the_signal_falls(moments: int, tmp_path: Path) -> None:
    """The sweep of six runs takes about five seconds after its first line."""
    chance = random.Random(moments)
    for number in range(moments):
        folder, wait = tmp_path / str(number), chance.uniform(0.0, 4.0)
        code, said = interrupt(folder, wait)
        case = f"after {wait:.3f} s: {said}"
        if code == 0:  # it came after the last line of the program
            assert finished(folder) == 6 and (folder / "report.html").exists(), case
            continue
        assert code == 130, case
        assert said.startswith("flower-vfl: interrupted; "), case
        assert "the same command" in said and "Traceback" not in said, case
        assert f"; {finished(folder)} of 6 runs are" in said or finished(folder) == 6
