"""A training step of each engine beside the plain PyTorch step of the same model.

Prints one ratio per line: to the plain loop, and to a plain loop that is split too (a
backward pass and an optimizer for each part, but no messages). Both loops use
``torch.optim.Adam`` as it comes; the parties' default is the fused Adam, which takes
half the time, so a third line shows the split loop with that one. All sides run in
turns in one run, with the same data, models, batches and number of threads; a ratio is
the median of the turns' ratios, so that a machine that is busy for a while disturbs all
sides alike.
The bottom model is the deep part of Marvell's Criteo model (two hidden layers of 128
before the cut layer). The cost of a message does not depend on the model, so one line
shows the small default model of ``flower-vfl run`` too, where it weighs most. The last
line compares a run with encrypted embeddings and gradients with one without; the limit
is 1.15.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.simulations.runtime.flower_runtime import run_app
from flower_vfl.strategies import VerticalStrategy

APP = Path(__file__).parent / "step_app"
sys.path.insert(0, str(APP))

from step_app.work import (  # noqa: E402
    MARVELL,
    SMALL,
    PlainLoop,
    SplitLoop,
    bottom_model,
    features,
    labels,
    top_model,
)

SHAPES = [
    (1024, 1, 8, MARVELL),
    (1024, 2, 128, MARVELL),
    (1024, 8, 64, MARVELL),
    (1024, 1, 8, SMALL),
]


MANY = 128  # parties in one process
EPOCHS = 4  # of each turn, so that what a run costs once does not count


def report(
    shape: str,
    engine: str,
    split: list[float],
    plain: list[float],
    beside: str = "plain",
) -> None:
    ratio = statistics.median(s / p for s, p in zip(split, plain, strict=True))
    ours, theirs = statistics.median(split), statistics.median(plain)
    print(
        f"{shape}: {engine}/{beside} = {ratio:.2f}   "
        f"({ours * 1e3:.2f} ms / {theirs * 1e3:.2f} ms)",
        flush=True,
    )


def in_turns(
    batch_size: int, parties: int, width: int, kind: str, turns: int
) -> tuple[list[float], ...]:
    """Return the seconds of a step in process, in one piece, in pieces, and fused."""
    torch.manual_seed(0)
    loops = (
        PlainLoop(parties, width, batch_size, kind),
        SplitLoop(parties, width, batch_size, kind),
        SplitLoop(parties, width, batch_size, kind, fused=True),
    )
    passive = [
        PassiveParty(features(party), bottom_model(width, kind), device="cpu")
        for party in range(1, parties + 1)
    ]
    objective = CrossEntropy(top_model(parties, width))
    strategy = VerticalStrategy(
        batch_size=batch_size, test_fraction=0.0, evaluate_every=0, progress=False
    )
    seconds: tuple[list[float], ...] = ([], [], [], [])
    with in_process([LabelParty(labels(), objective, device="cpu"), *passive]) as grid:
        for turn in range(turns + 1):
            theirs = [
                sum(loop.epoch() for _ in range(EPOCHS)) / EPOCHS for loop in loops
            ]
            training = strategy.connect(grid, num_rounds=EPOCHS)
            started = time.perf_counter()
            training.run()
            ours = (time.perf_counter() - started) / training.state.step
            if turn:  # the first turn warms up
                for kept, value in zip(seconds, (ours, *theirs), strict=True):
                    kept.append(value)
    return seconds


def measure(batch_size: int, parties: int, width: int, kind: str, turns: int) -> None:
    ours, plain, pieces, fused = in_turns(batch_size, parties, width, kind, turns)
    shape = f"B={batch_size} parties={parties} d={width} {kind}"
    report(shape, "in-process", ours, plain)
    report(shape, "in-process", ours, pieces, "split loop")
    report(shape, "in-process", ours, fused, "split loop, fused Adam")


def measure_parties(turns: int) -> None:
    """Print what one more party in this process costs."""
    few = in_turns(64, 2, 4, SMALL, turns)
    many = in_turns(64, MANY, 4, SMALL, max(1, turns // 5))
    ours, _, pieces, _ = (
        (statistics.median(m) - statistics.median(f)) / (MANY - 2) * 1e3
        for f, m in zip(few, many, strict=True)
    )
    print(
        f"each further party, B=64 d=4 {SMALL}, {MANY} parties: {ours:.2f} ms "
        f"(split loop {pieces:.2f} ms)",
        flush=True,
    )


def measure_ray(batch_size: int, parties: int, width: int, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        config = {
            "out": str(out),
            "batch-size": batch_size,
            "parties": parties,
            "width": width,
            "turns": turns,
        }
        run_app(APP, run_config=config, nodes=parties + 1, timeout=600)
        seconds = json.loads(out.read_text())
    shape = f"B={batch_size} parties={parties} d={width} {MARVELL}"
    report(shape, "ray (resident)", seconds["split"], seconds["plain"])
    report(shape, "ray (pipeline=1)", seconds["pipelined"], seconds["plain"])
    report(shape, "ray (sealed)", seconds["sealed"], seconds["split"], "ray (unsealed)")


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15, help="turns of each side")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument(
        "--skip-ray", action="store_true", help="only the parties in one process"
    )
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    for shape in SHAPES:
        measure(*shape, turns=arguments.turns)
    measure_parties(arguments.turns)
    if not arguments.skip_ray:
        measure_ray(1024, 2, 128, arguments.turns)


if __name__ == "__main__":
    main()
