"""The time of each defense beside one ``torch.randn(B, d)`` plus one addition.

Prints one ratio per line. Both sides alternate on the same gradient, and the ratio is
the median over the turns. Times are those of the processor: what else the machine does
would hit the longer side more often.
``--leak`` measures instead what the order of the entries, which SGSub keeps, reveals
about the labels.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from flower_vfl import Batch, CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.strategies import (
    FLSG,
    PPDL,
    Geno,
    GradientCompression,
    Iso,
    Marvell,
    MaxNorm,
    MultiBucket,
    NoisyGradients,
    SGSub,
    VerticalStrategy,
    solve_marvell,
)
from flower_vfl.transform import GradientTransform

SHAPES = [(1024, 128), (128, 1600), (32768, 128)]
TRANSFORMS: list[tuple[GradientTransform, float | None]] = [  # and the largest ratio
    (Marvell(), 4.0),
    (Iso(), 2.0),
    (MaxNorm(), 2.0),
    (NoisyGradients(), 2.0),
    (GradientCompression(), 8.0),
    (MultiBucket(), None),
    (PPDL(), None),
    (SGSub(), 7.0),
    (FLSG(), None),
    (Geno(), None),
]
SOLVE_LIMIT = 0.3  # ms


def verdict(value: float, limit: float | None) -> str:
    if limit is None:
        return ""
    return f"limit {limit:g}: {'ok' if value <= limit else 'EXCEEDED'}"


def seconds(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def two_classes(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return a gradient like that of a binary task, and its labels."""
    stream = torch.Generator().manual_seed(0)
    labels = (torch.rand(rows, generator=stream) < 0.25).long()
    side = torch.randn(width, generator=stream)
    error = labels * 0.7 - 0.2 + 0.1 * torch.randn(rows, generator=stream)
    noise = 0.1 * torch.randn(rows, width, generator=stream)
    return (error[:, None] * side + noise) / rows, labels


def measure(rows: int, width: int, turns: int) -> None:
    gradient, labels = two_classes(rows, width)
    stream = torch.Generator().manual_seed(1)

    def randn_and_add() -> Tensor:
        return torch.randn(rows, width, generator=stream) + gradient

    plain: list[float] = []
    ours: list[list[float]] = [[] for _ in TRANSFORMS]
    for turn in range(turns + 1):
        noise = seconds(randn_and_add)
        batch = Batch("passive-1", turn + 1, 0, labels)
        found = [seconds(partial(t, gradient, batch)) for t, _ in TRANSFORMS]
        if turn:  # the first turn warms up
            plain.append(noise)
            for times, taken in zip(ours, found, strict=True):
                times.append(taken)
    for (transform, limit), times in zip(TRANSFORMS, ours, strict=True):
        ratio = statistics.median(t / p for t, p in zip(times, plain, strict=True))
        milliseconds = statistics.median(times) * 1e3
        print(
            f"B={rows} d={width}: {type(transform).__name__}/randn = {ratio:.2f}   "
            f"({milliseconds:.2f} ms) {verdict(ratio, limit)}".rstrip(),
            flush=True,
        )


def measure_solver(turns: int) -> None:
    stream = np.random.default_rng(0)
    problems = [
        (u, v, 128, 1.0, p, s)
        for u, v, p, s in zip(
            stream.uniform(0.001, 0.1, 200),
            stream.uniform(0.001, 0.1, 200),
            stream.uniform(0.05, 0.5, 200),
            stream.uniform(0.5, 16.0, 200),
            strict=True,
        )
    ]
    runs = [partial(solve_marvell, *problem) for problem in problems]
    found = statistics.median(map(seconds, runs * max(1, turns // 10))) * 1e3
    print(f"solve_marvell = {found:.3f} ms   {verdict(found, SOLVE_LIMIT)}", flush=True)


class Recorder:
    """A transform that changes nothing and records gradients."""

    requires_labels = True

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Batch]] = []

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        """Record a gradient and return it."""
        self.seen.append((gradient.clone(), batch))
        return gradient

    def state_dict(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore nothing."""


def record(width: int, epochs: int) -> list[tuple[Tensor, Batch]]:
    """Return the gradients of a split model in training, on real data."""
    data = load_breast_cancer()
    columns = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0)).float()
    torch.manual_seed(0)

    def party(features: Tensor) -> PassiveParty:
        hidden = nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, width))
        return PassiveParty(features, hidden, device="cpu")

    top = nn.Sequential(nn.Linear(2 * width, 16), nn.ReLU(), nn.Linear(16, 1))
    labels = torch.tensor(data.target)
    label = LabelParty(labels, CrossEntropy(top), device="cpu", trust_server=True)
    parties = [label, party(columns[:, :15]), party(columns[:, 15:])]
    recorder = Recorder()
    strategy = VerticalStrategy(
        batch_size=64, evaluate_every=0, progress=False, defense=[recorder]
    )
    with in_process(parties) as grid:
        strategy.start(grid, num_rounds=epochs)
    return recorder.seen


def ranks(gradient: Tensor) -> Tensor:
    """Return the rank of each entry among all of them, about zero."""
    flat = rankdata(gradient.numpy(), axis=None).reshape(gradient.shape)
    return torch.tensor(flat - flat.mean())


def attacks(
    gradient: Tensor, labels: NDArray[np.int64], known: int
) -> tuple[float, float, float]:
    """Return the AUC of three attacks; the label of one positive row is known."""
    by_rank = ranks(gradient)
    scores = (
        gradient.norm(dim=1),
        torch.cosine_similarity(gradient, gradient[known : known + 1]),
        torch.cosine_similarity(by_rank, by_rank[known : known + 1]),
    )
    others = np.arange(len(labels)) != known
    norm, cosine, rank = (
        float(roc_auc_score(labels[others], score.numpy()[others])) for score in scores
    )
    return norm, cosine, rank


def measure_leak(epochs: int) -> None:
    """Print mean AUCs of attacks on gradients before and after SGSub."""
    for width in (1, 16, 64):
        before, after = [], []
        for gradient, batch in record(width, epochs):
            assert batch.labels is not None
            labels = batch.labels.numpy().reshape(-1)
            positive = np.flatnonzero(labels == 1)
            if len(positive) < 2 or len(positive) == len(labels):
                continue
            substitute = SGSub()(gradient, replace(batch, seed=0))
            assert substitute is not None
            before.append(attacks(gradient, labels, positive[0]))
            after.append(attacks(substitute, labels, positive[0]))
        for i, name in enumerate(("norm", "cosine", "rank order")):
            raw, kept = (float(np.mean([a[i] for a in x])) for x in (before, after))
            print(
                f"d={width}, {len(before)} batches: AUC of the {name} attack "
                f"{raw:.3f} before and {kept:.3f} after SGSub",
                flush=True,
            )


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15, help="turns of each side")
    parser.add_argument("--leak", action="store_true", help="what SGSub leaks, instead")
    parser.add_argument("--epochs", type=int, default=20, help="epochs for --leak")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    if arguments.leak:
        measure_leak(arguments.epochs)
        return
    for shape in SHAPES:
        measure(*shape, turns=arguments.turns)
    measure_solver(arguments.turns)


if __name__ == "__main__":
    main()
