"""What the leakage meter costs beside a training step.

Two parties, 1024 rows, a cut layer of 128 columns, one torch thread. Each line is a
list of attacks on both parties' gradients: microseconds (the fastest call and the
median), and the share of a plain training step of the same shape. Both sides run in
turns; the share is the median of the turns' ratios, so that a machine that is busy for
a while disturbs both sides alike. The model is the one of ``step.py``. The last lines
are whole steps of split training, messages included, with the four attacks over
without.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path

import torch

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.leakage.attacks import LeakageMeter
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.strategies import VerticalStrategy

sys.path.insert(0, str(Path(__file__).parent / "step_app"))

from step_app.work import MARVELL, SMALL, PlainLoop, bottom_model, features, top_model
from step_app.work import labels as step_labels

FOUR = ("norm", "cosine", "mean", "median")
CASES: list[tuple[str, ...]] = [
    ("norm",),
    ("cosine",),
    ("mean",),
    ("median",),
    ("median:sample=none",),
    ("spectral",),
    FOUR[:3],
    FOUR,
    (*FOUR[:3], "median:sample=none"),
    ("norm", "cosine", "mean:held_out=true", "median:held_out=true"),
]
CALLS = 8


def gradients(
    rows: int, parties: int, width: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    labels = (torch.rand(rows, generator=stream) < 0.25).float()
    shift = labels.unsqueeze(1) - 0.25
    return {
        f"passive-{p}": 1e-3 * (torch.randn(rows, width, generator=stream) + shift)
        for p in range(1, parties + 1)
    }, labels


def in_training(rows: int, parties: int, width: int, kind: str, turns: int) -> None:
    """Print the time of a step of split training with all four attacks over without."""
    grids, strategies = [], []
    for leakage in (None, Leakage(FOUR)):
        torch.manual_seed(0)
        passive = [
            PassiveParty(features(party), bottom_model(width, kind), device="cpu")
            for party in range(1, parties + 1)
        ]
        objective = CrossEntropy(top_model(parties, width))
        label = LabelParty(step_labels(), objective, device="cpu")
        grids.append(in_process([label, *passive]))
        strategies.append(
            VerticalStrategy(
                batch_size=rows,
                test_fraction=0.0,
                evaluate_every=0,
                progress=False,
                leakage=leakage,
            )
        )
    ratios = []
    for turn in range(turns + 1):
        seconds = []
        for strategy, grid in zip(strategies, grids, strict=True):
            training = strategy.connect(grid)
            started = time.perf_counter()
            training.run()
            seconds.append((time.perf_counter() - started) / training.steps)
        if turn:  # the first turn warms up
            ratios.append(seconds[1] / seconds[0])
    ratio = statistics.median(ratios)
    print(f"in training, {' '.join(FOUR)}, {kind}: with/without = {ratio:.2f}")


def main() -> None:
    """Measure every list of attacks in turns with a training step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=25, help="turns of each side")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--parties", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    batch, labels = gradients(given.rows, given.parties, given.width)
    loops = [
        PlainLoop(given.parties, given.width, given.rows, kind)
        for kind in (MARVELL, SMALL)
    ]
    meters = [LeakageMeter(attacks) for attacks in CASES]
    steps: list[list[float]] = [[] for _ in loops]
    costs: list[list[float]] = [[] for _ in meters]
    for turn in range(given.turns + 1):
        seconds = [loop.epoch() for loop in loops]
        for cost, meter in zip(costs, meters, strict=True):
            started = time.perf_counter()
            for call in range(CALLS):
                meter.measure(batch, labels, turn * CALLS + call)
            if turn:  # the first turn warms up
                cost.append((time.perf_counter() - started) / CALLS)
        if turn:
            for step, second in zip(steps, seconds, strict=True):
                step.append(second)
    for kind, step in zip((MARVELL, SMALL), steps, strict=True):
        print(f"a plain step, {kind}: {statistics.median(step) * 1e3:.2f} ms")
    for attacks, cost in zip(CASES, costs, strict=True):
        shares = [
            statistics.median(c / s for c, s in zip(cost, step, strict=True))
            for step in steps
        ]
        print(
            f"{' '.join(attacks)}: {min(cost) * 1e6:.0f} us "
            f"(median {statistics.median(cost) * 1e6:.0f}), "
            f"{shares[0]:.1%} of a step ({shares[1]:.1%} with {SMALL})"
        )
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    for kind in (MARVELL, SMALL):
        shape = given.rows, given.parties, given.width
        in_training(*shape, kind, given.turns)


if __name__ == "__main__":
    main()
