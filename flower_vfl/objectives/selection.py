"""GAFM's settings, chosen on a small part of the rows as its paper does.

The paper shares that part between the parties: select before a run, on rows whose
labels may be shown, or in a simulation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.randomness import RandomState, derive_seed, generator

from .base import OptimizerFactory
from .gafm import GAFM

DELTAS = (0.05, 0.1, 0.2, 0.3, 0.5)
ATTACKS = ("norm", "mean", "median")
LEARNED = 0.6  # train AUC below which a ratio says nothing
PAPER_ADAM: OptimizerFactory = partial(torch.optim.Adam, lr=1e-4)


@dataclass(frozen=True)
class Rehearsal:
    """Training in one process on a part of the rows; the defaults are the paper's.

    Parameters
    ----------
    features : Sequence[Sequence[Tensor]]
        For each passive party what its bottom model takes, all rows.
    labels : Tensor
        Labels of all rows.
    bottoms : Callable[[], Sequence[nn.Module]]
        Makes a new bottom model for each party.
    fraction : float (default: 0.1)
        Share of the rows that is used; drawn anew in every repetition.
    epochs : int (default: 300)
        Passes over them.
    batch_size : int (default: 1028)
        Rows of a batch.
    optimizer : OptimizerFactory (default: Adam with lr 1e-4)
        For every module.
    aggregation : str (default: "mean")
        How embeddings are joined.
    seed : int (default: 0)
        Decides the rows, the models and the batches.
    """

    features: Sequence[Sequence[Tensor]]
    labels: Tensor
    bottoms: Callable[[], Sequence[nn.Module]]
    fraction: float = 0.1
    epochs: int = 300
    batch_size: int = 1028
    optimizer: OptimizerFactory = PAPER_ADAM
    aggregation: str = "mean"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be rehearsed."""
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(
                f"fraction must be above 0 and at most 1, got {self.fraction}"
            )
        if self.epochs < 1 or self.batch_size < 2:
            raise ConfigError("a rehearsal needs at least 1 epoch and batches of 2")
        if not self.features:
            raise ConfigError("a rehearsal needs the features of at least one party")


@dataclass
class Trial:
    """What one rehearsal showed.

    Parameters
    ----------
    train_auc : float
        AUC of the predictions for the rows that it trained on.
    leak_auc : dict[str, float]
        Flipped leak AUC of each attack, mean over parties and batches of the last
        epoch.
    magnitudes : dict[str, float]
        Mean magnitude of each part of the gradient, mean over all steps.
    averages : dict[str, float]
        The same of its average, with its sign.
    """

    train_auc: float
    leak_auc: dict[str, float]
    magnitudes: dict[str, float]
    averages: dict[str, float]


@dataclass(frozen=True)
class DeltaChoice:
    """The Δ with the smallest mean of leak AUC / train AUC.

    Parameters
    ----------
    delta : float
        The choice.
    ratios : dict[float, float]
        The mean ratio of every candidate.
    train_aucs : dict[float, float]
        The mean train AUC of every candidate.
    """

    delta: float
    ratios: dict[float, float] = field(default_factory=dict)
    train_aucs: dict[float, float] = field(default_factory=dict)

    @property
    def learned(self) -> bool:
        """Whether the choice means anything: that model has learned the labels."""
        return self.train_aucs[self.delta] >= LEARNED


@dataclass(frozen=True)
class GammaChoice:
    """The γ that makes the two parts of the gradient equally large.

    Parameters
    ----------
    gamma : float
        The choice.
    gan, ce : float
        Size of the GAN part at γ = 1 and of the CE part.
    """

    gamma: float
    gan: float
    ce: float


def select_delta(
    rehearsal: Rehearsal,
    make: Callable[[float], GAFM],
    deltas: Sequence[float] = DELTAS,
    repeats: int = 5,
) -> DeltaChoice:
    """Return the Δ that leaks least for what it learns (the paper's D.3).

    Parameters
    ----------
    rehearsal : Rehearsal
        Parties, rows and training.
    make : Callable[[float], GAFM]
        Makes a new objective with a Δ, e.g. ``lambda d: GAFM(1, delta=d)``.
    deltas : Sequence[float] (default: (0.05, 0.1, 0.2, 0.3, 0.5))
        The candidates; of equal ones the first is chosen.
    repeats : int (default: 5)
        Rehearsals of each, on other rows.
    """
    if not deltas or repeats < 1:
        raise ConfigError("there must be a delta to try and at least one repetition")
    ratios, train_aucs = {}, {}
    for delta in deltas:
        trials = [rehearse(rehearsal, partial(make, delta), i) for i in range(repeats)]
        ratios[delta] = statistics.fmean(
            statistics.fmean(t.leak_auc.values()) / t.train_auc for t in trials
        )
        train_aucs[delta] = statistics.fmean(t.train_auc for t in trials)
    return DeltaChoice(min(ratios, key=ratios.__getitem__), ratios, train_aucs)


def select_gamma(
    rehearsal: Rehearsal,
    make: Callable[[float], GAFM],
    repeats: int = 1,
    literal: bool = False,
) -> GammaChoice:
    """Return the γ that balances the GAN part and the CE part (the paper's D.2).

    Parameters
    ----------
    rehearsal : Rehearsal
        Parties, rows and training.
    make : Callable[[float], GAFM]
        Makes a new objective with a γ, e.g. ``lambda g: GAFM(1, gamma=g)``.
    repeats : int (default: 1)
        Rehearsals, on other rows.
    literal : bool (default: False)
        Compare the size of the averages (the paper's Table 7), in which entries of
        opposite sign cancel, and not the mean magnitude of the entries.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    trials = [rehearse(rehearsal, partial(make, 1.0), i) for i in range(repeats)]
    sizes = [t.averages if literal else t.magnitudes for t in trials]
    gan = abs(statistics.fmean(size["gan"] for size in sizes))
    ce = abs(statistics.fmean(size["ce"] for size in sizes))
    if not gan > 0.0:
        raise ConfigError(
            "the GAN part of the gradient is zero, and no gamma makes up for that; "
            "raise clip"
        )
    return GammaChoice(ce / gan, gan, ce)


def rehearse(rehearsal: Rehearsal, make: Callable[[], GAFM], repeat: int = 0) -> Trial:
    """Train a new model with an objective on a part of the rows and attack it.

    Parameters
    ----------
    rehearsal : Rehearsal
        Parties, rows and training.
    make : Callable[[], GAFM]
        Makes a new objective.
    repeat : int (default: 0)
        Number of the repetition, which decides rows and weights.
    """
    count = len(rehearsal.labels)
    stream = generator(rehearsal.seed, "rehearsal", repeat)
    drawn = torch.randperm(count, generator=stream)
    used = drawn[: max(round(rehearsal.fraction * count), 2)]
    data = [[part[used] for part in party] for party in rehearsal.features]
    with RandomState(derive_seed(rehearsal.seed, "rehearsal weights", repeat)):
        objective = make()
        labels = objective.encode(rehearsal.labels[used])
        return _train(rehearsal, objective, data, labels)


def _train(
    rehearsal: Rehearsal, objective: GAFM, data: list[list[Tensor]], labels: Tensor
) -> Trial:
    from flower_vfl.parties.aggregation import Aggregation

    joiner = Aggregation(rehearsal.aggregation)
    bottoms = nn.ModuleList(rehearsal.bottoms())
    objective.configure(rehearsal.optimizer)
    optimizer = rehearsal.optimizer(bottoms.parameters())
    leaks: list[dict[str, float]] = []
    sizes: dict[str, list[float]] = {}
    for epoch in range(1, rehearsal.epochs + 1):
        for rows in torch.split(torch.randperm(len(labels)), rehearsal.batch_size):
            parts = _embed(bottoms, data, rows)
            joined = joiner(parts)
            outcome = objective.step(joined.detach().requires_grad_(), labels[rows])
            gradients = torch.autograd.grad(
                joined, parts, outcome.gradient, retain_graph=True
            )
            optimizer.zero_grad()
            joined.backward(outcome.gradient)
            optimizer.step()
            for name, part in objective.gradient_parts.items():
                sizes.setdefault(f"{name} magnitude", []).append(
                    float(part.abs().mean())
                )
                sizes.setdefault(f"{name} average", []).append(float(part.mean()))
            if epoch == rehearsal.epochs:
                leaks += [_attack(gradient, labels[rows]) for gradient in gradients]
    bottoms.eval()
    with torch.no_grad():
        everything = torch.arange(len(labels))
        scores = objective.eval().predict(joiner(_embed(bottoms, data, everything)))
    mean = {name: statistics.fmean(values) for name, values in sizes.items()}
    return Trial(
        _train_auc(scores, labels),
        _mean_leak(leaks),
        {name: mean[f"{name} magnitude"] for name in ("gan", "ce")},
        {name: mean[f"{name} average"] for name in ("gan", "ce")},
    )


def _embed(
    bottoms: nn.ModuleList, data: list[list[Tensor]], rows: Tensor
) -> list[Tensor]:
    return [
        bottom(*(part[rows] for part in party))
        for bottom, party in zip(bottoms, data, strict=True)
    ]


def _attack(gradient: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the flipped leak AUC of the paper's three attacks on one batch."""
    # The attacks import Task from this package.
    from flower_vfl.leakage.attacks import (
        leak_auc,
        mean_attack,
        median_attack,
        norm_attack,
    )

    if len(torch.unique(labels)) < 2:
        return {}
    numbers = labels.long()
    hard = int(numbers.max()) < 2  # what the paper tabulates
    scores = {
        "norm": norm_attack(gradient),
        "mean": mean_attack(gradient, numbers, hard=hard).double(),
        "median": median_attack(gradient, numbers, hard=hard).double(),
    }
    return {name: leak_auc(s, numbers, flipped=True) for name, s in scores.items()}


def _train_auc(scores: Tensor, labels: Tensor) -> float:
    from flower_vfl.leakage.attacks import leak_auc

    auc = leak_auc(scores, labels.long())
    if math.isnan(auc):
        raise ConfigError("the rows of a rehearsal are all of one class; use more")
    return max(auc, 1e-6)


def _mean_leak(leaks: list[dict[str, float]]) -> dict[str, float]:
    measured = [leak for leak in leaks if leak]
    if not measured:
        raise ConfigError("no batch of a rehearsal has two classes; use larger ones")
    return {name: statistics.fmean(leak[name] for leak in measured) for name in ATTACKS}
