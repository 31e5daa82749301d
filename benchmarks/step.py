"""A training step of each engine beside the plain PyTorch step of the same model.

Prints one ratio per line. Both sides run in turns in one run, with the same data,
models, batches and number of threads; the ratio is the median of the turns' ratios, so
that a machine that is busy for a while disturbs both sides alike.
The bottom model is the deep part of Marvell's Criteo model (two hidden layers of 128
before the cut layer). The cost of a message does not depend on the model, so one line
shows the small default model of ``flower-vfl run`` too, where it weighs most.
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


def report(shape: str, engine: str, split: list[float], plain: list[float]) -> None:
    ratio = statistics.median(s / p for s, p in zip(split, plain, strict=True))
    ours, theirs = statistics.median(split), statistics.median(plain)
    print(
        f"{shape}: {engine}/plain = {ratio:.2f}   "
        f"({ours * 1e3:.2f} ms / {theirs * 1e3:.2f} ms)",
        flush=True,
    )


def measure(batch_size: int, parties: int, width: int, kind: str, turns: int) -> None:
    torch.manual_seed(0)
    loop = PlainLoop(parties, width, batch_size, kind)
    passive = [
        PassiveParty(features(party), bottom_model(width, kind), device="cpu")
        for party in range(1, parties + 1)
    ]
    objective = CrossEntropy(top_model(parties, width))
    strategy = VerticalStrategy(
        batch_size=batch_size, test_fraction=0.0, evaluate_every=0, progress=False
    )
    plain, split = [], []
    with in_process([LabelParty(labels(), objective, device="cpu"), *passive]) as grid:
        for turn in range(turns + 1):
            seconds = loop.epoch()
            training = strategy.connect(grid)
            started = time.perf_counter()
            training.run()
            if turn:  # the first turn warms up
                plain.append(seconds)
                split.append((time.perf_counter() - started) / training.steps)
    report(
        f"B={batch_size} parties={parties} d={width} {kind}",
        "in-process",
        split,
        plain,
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
    if not arguments.skip_ray:
        measure_ray(1024, 2, 128, arguments.turns)


if __name__ == "__main__":
    main()
