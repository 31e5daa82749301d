"""Time per epoch of LADSG and of its baselines, as a ratio to vanilla in the same run.

All methods train at the same time, and take turns: a step of the first, a step of the
second and so on, so that whatever else the machine does meets all of them. The ratio is
that of a step to vanilla's step of the same round, the median over all steps from epoch
2 on but the first of each epoch: of wall time, and of the CPU time of the process,
which other processes disturb less. Evaluation is not counted.

LADistill's teacher is trained once, before the first step with soft labels. Its time is
printed by itself, and in the last column it is spread over the epochs of a training, 15
on CIFAR-10 and 20 on Spambase: (epoch + teacher / epochs) / vanilla, of CPU time.
On "cifar10-own" the label party has one half of the image and the teacher is a CNN on
it, as in the paper's Table 3; it is trained for 5 epochs to be measured, and counted
for 50, the default. On the others it is an MLP on the parties' embeddings.

The paper (Figure 4 and its text), CIFAR-10, ResNet-20 on a GPU: vanilla 52 s, LADSG 58
s (1.12), GC 63 s (1.21), NG 64 s (1.23), PPDL 77 s (1.48). Wanted of LADSG: at most
1.3.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.objectives import ladistill, train_teacher
from flower_vfl.simulations.app import client_app, make_strategy
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.objectives import preset
from flower_vfl.strategies import build_defense
from flower_vfl.strategies.defenses.compose import NoDefense
from flower_vfl.transform import Batch

Seconds = tuple[float, float]  # wall and CPU
WANTED = 1.3
PAPER = {"vanilla": 52, "LADSG": 58, "GC": 63, "NG": 64, "PPDL": 77}
_CIFAR = RunConfig(
    dataset="cifar10",
    bottom="cnn:batch_norm=true",
    top="ladsg-fcnn4",
    width=64,
    optimizer="adam:lr=0.001",
    epochs=15,
    batch_size=128,
)
_TABLE = RunConfig(dataset="spambase", top="ladsg-fcnn3", optimizer="adam:lr=0.001")


@dataclass(frozen=True)
class Case:
    """A model: its settings and how LADistill is set for it.

    Parameters
    ----------
    run : RunConfig
        Its epochs are those that the teacher's time is spread over.
    soft : str
        Parameters of the preset.
    teacher : tuple[int, int]
        For how many epochs the teacher is trained here, and for how many it counts.
    epochs : int (default: 2)
        For how many epochs everything is trained here.
    """

    run: RunConfig
    soft: str
    teacher: tuple[int, int] = (50, 50)
    epochs: int = 2


CASES = {
    "cifar10": Case(_CIFAR, "k=5,eps=0.7"),
    "cifar10-own": Case(
        replace(_CIFAR, parties=1, label_share="0.5"),
        "k=5,eps=0.7,teacher=cnn:batch_norm=true",
        (5, 50),
    ),
    "spambase": Case(_TABLE, "k=2,eps=0.3", epochs=10),
}
DEFENSES = {
    "GC": "gc:keep=0.25",
    "NG": "ng:scale=0.001",
    "MG": "mg:bins=12,bound=0.001",
    "PPDL": "ppdl:theta=0.5",
    "FLSG": "flsg",
    "SGSub": "sgsub",
}
METHODS = ("vanilla", "LADSG", "LADistill", *DEFENSES)


class Turns:
    """Lets one of several threads run at a time, each for one step."""

    def __init__(self, names: Sequence[str]) -> None:
        self.queue = list(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        """Wait until it is a thread's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self.queue[0] == name)

    def end(self, name: str, leave: bool = False) -> None:
        """End a thread's turn; `leave` ends its last one."""
        with self._changed:
            self.queue.remove(name)
            self.queue += [] if leave else [name]
            self._changed.notify_all()


class Clock(NoDefense):
    """Times a method's steps, from one gradient of the first party to the next."""

    def __init__(self, name: str, turns: Turns) -> None:
        self.name, self.turns = name, turns
        self.steps: list[tuple[int, Seconds]] = []  # epoch and time
        self._start = now()

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        """Note the time, and let the others take a step."""
        if batch.party == "passive-1":
            wall, cpu = (b - a for a, b in zip(self._start, now(), strict=True))
            self.steps.append((batch.epoch, (wall, cpu)))
            self.turns.end(self.name)
            self.turns.wait(self.name)
            self._start = now()
        return gradient

    def steady(self) -> list[Seconds]:
        """Return the steps from epoch 2 on, but for the first of each epoch."""
        return [
            seconds
            for (before, _), (epoch, seconds) in pairwise(self.steps)
            if before == epoch > 1
        ]

    def per_epoch(self) -> int:
        """Return the number of steps of an epoch."""
        return [epoch for epoch, _ in self.steps].count(1)


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def configured(case: Case, method: str) -> RunConfig:
    """Return the settings of a method."""
    count = case.epochs
    config = replace(case.run, epochs=count, evaluate_every=count, device="cpu")
    if method in DEFENSES:
        return replace(config, defense=DEFENSES[method])
    if method == "vanilla":
        return config
    parts = "" if method == "LADSG" else "substitute=false,detect=false,"
    parts += f"first_epoch=vanilla,balanced=false,epochs={case.teacher[0]}"
    settings = preset(f"ladsg:{parts},{case.soft}")
    return replace(config, **settings)  # type: ignore[arg-type]


def train(config: RunConfig, clock: Clock) -> None:
    """Train one method, in turns with the others."""
    clock.turns.wait(clock.name)
    torch.set_num_threads(1)
    strategy = make_strategy(config, progress=False)
    defenses = [build_defense(config.defense)] if config.defense else []
    strategy.transforms = [clock, *defenses]
    nodes = config.parties + 1
    try:
        with InProcessGrid(client_app, nodes, config.to_run_config()) as grid:
            strategy.start(grid, num_rounds=config.epochs)
    finally:
        clock.turns.end(clock.name, leave=True)


def measure(case: Case, methods: Sequence[str]) -> tuple[list[Clock], dict[str, float]]:
    """Train all methods; return their clocks and the CPU seconds of their teachers."""
    turns, teachers = Turns(methods), dict.fromkeys(methods, 0.0)

    def timed(*arguments: Any) -> None:
        started = time.process_time()
        train_teacher(*arguments)
        trained, counted = case.teacher
        spent = time.process_time() - started
        teachers[turns.queue[0]] += spent / trained * counted

    clocks = [Clock(method, turns) for method in methods]
    jobs = [(configured(case, clock.name), clock) for clock in clocks]
    with (
        patch.object(ladistill, "train_teacher", timed),
        ThreadPoolExecutor(len(jobs)) as pool,
    ):
        for job in [pool.submit(train, *job) for job in jobs]:
            job.result()
    return clocks, teachers


def line(clock: Clock, vanilla: Clock, trained: float, case: Case) -> str:
    """Return what is printed about a method."""
    pairs = list(zip(clock.steady(), vanilla.steady(), strict=True))
    wall, cpu = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
    step, base = (statistics.median(s[1] for s in c.steady()) for c in (clock, vanilla))
    steps = clock.per_epoch()
    whole = cpu + trained / case.run.epochs / (base * steps)
    method, note = clock.name, ""
    paper = f"{PAPER[method] / PAPER['vanilla']:.2f}" if method in PAPER else ""
    if method == "LADSG" and case.run.dataset == "cifar10":
        note = "met" if max(wall, cpu) <= WANTED else "MISSED"
    return (
        f"| {method} | {step * steps:.3f} | {wall:.3f} | {cpu:.3f} | {paper} | {note} "
        f"| {trained:.2f} | {whole:.3f} |"
    )


def main() -> None:
    """Print one line for each case and method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--quick", action="store_true", help="a small table only")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    methods = list(dict.fromkeys(["vanilla", *arguments.methods]))
    for name in ["spambase"] if arguments.quick else arguments.cases:
        clocks, teachers = measure(CASES[name], methods)
        print(f"{name}: {len(clocks[0].steady())} rounds of steps")
        print(
            "| method | CPU s per epoch | wall ratio | CPU ratio | paper | at most "
            f"{WANTED} | teacher, CPU s | CPU ratio with teacher |"
        )
        print("|---" * 8 + "|")
        for clock in clocks:
            print(line(clock, clocks[0], teachers[clock.name], CASES[name]))
        print(flush=True)


if __name__ == "__main__":
    main()
