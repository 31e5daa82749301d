"""A training step of each engine beside the plain PyTorch step of the same model.

Prints one ratio per line. Both sides run in turns in one process, with the same data,
models, batches and number of threads; the ratio is that of the medians over the turns.
The bottom model is the deep part of Marvell's Criteo model (two hidden layers of 128
before the cut layer). The cost of a message does not depend on the model, so the last
line shows the small default model of ``flower-vfl run`` too, where it weighs most.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.simulations.inputs import InputSpec
from flower_vfl.simulations.models import build_bottom, build_top
from flower_vfl.strategies import VerticalStrategy

MARVELL, SMALL = "mlp:hidden=128+128", "mlp:hidden=64"
SHAPES = [
    (1024, 1, 8, MARVELL),
    (1024, 2, 128, MARVELL),
    (1024, 8, 64, MARVELL),
    (1024, 1, 8, SMALL),
]
COLUMNS = 32  # features of each party
ROWS = 8192


def models(
    parties: int, width: int, bottom: str = MARVELL
) -> tuple[list[nn.Module], nn.Module]:
    """Return the bottom models and a linear top model."""
    torch.manual_seed(0)
    spec = InputSpec(numeric=COLUMNS)
    bottoms: list[nn.Module] = [
        build_bottom(bottom, spec, width) for _ in range(parties)
    ]
    return bottoms, build_top("linear", width * parties, 1)


def plain_epoch(
    features: list[Tensor],
    labels: Tensor,
    bottoms: list[nn.Module],
    top: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
) -> float:
    """Return the seconds of a step of the ordinary loop."""
    started = time.perf_counter()
    batches = torch.randperm(ROWS).split(batch_size)
    for rows in batches:
        optimizer.zero_grad()
        parts = [m(x[rows]) for m, x in zip(bottoms, features, strict=True)]
        output = top(torch.cat(parts, dim=1))[:, 0]
        loss = F.binary_cross_entropy_with_logits(output, labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()
    return (time.perf_counter() - started) / len(batches)


def measure(
    batch_size: int, parties: int, width: int, bottom: str, turns: int
) -> float:
    """Return the in-process step as a multiple of the plain one."""
    features = [torch.randn(ROWS, COLUMNS) for _ in range(parties)]
    labels = torch.randint(0, 2, (ROWS,)).float()
    bottoms, top = models(parties, width, bottom)
    modules = nn.ModuleList([*bottoms, top])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)
    ours, our_top = models(parties, width, bottom)
    grid = in_process(
        [
            LabelParty(labels, CrossEntropy(our_top), device="cpu"),
            *(
                PassiveParty(x, m, device="cpu")
                for x, m in zip(features, ours, strict=True)
            ),
        ]
    )
    strategy = VerticalStrategy(
        batch_size=batch_size, test_fraction=0.0, evaluate_every=0, progress=False
    )
    plain, split = [], []
    for turn in range(turns + 1):
        seconds = plain_epoch(features, labels, bottoms, top, optimizer, batch_size)
        training = strategy.connect(grid, num_rounds=1)
        started = time.perf_counter()
        training.run()
        if turn:  # the first turn warms up
            plain.append(seconds)
            split.append((time.perf_counter() - started) / training.steps)
    grid.close()
    base, other = statistics.median(plain), statistics.median(split)
    print(
        f"B={batch_size} parties={parties} d={width} {bottom}: in-process/plain = "
        f"{other / base:.2f}   ({other * 1e3:.2f} ms / {base * 1e3:.2f} ms)",
        flush=True,
    )
    return other / base


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15, help="turns of each side")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    for shape in SHAPES:
        measure(*shape, turns=arguments.turns)


if __name__ == "__main__":
    main()
