"""GAN-based Vertical Federated Learning for Label Protection (Han and Guan).

https://arxiv.org/abs/2302.02245. Appendix D: Δ and γ are selected on a part of rows.
All parties see the labels of that part, so use rows whose labels may be shown.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, require
from flower_vfl.randomness import RandomState, derive_seed, generator

from .base import OptimizerFactory
from .gafm import GAFM

DELTAS = (0.05, 0.1, 0.2, 0.3, 0.5)
LEARNED = 0.6  # train AUC below which a model has not learned the labels
PAPER_ADAM: OptimizerFactory = partial(torch.optim.Adam, lr=1e-4)


@dataclass(frozen=True)
class SubsetTraining:
    """Settings of a training in one process on a part of the rows.

    Parameters
    ----------
    features, labels : Sequence[Sequence[Tensor]], Tensor
        Inputs of each passive party's bottom model, and labels, of all rows.
    bottoms : Callable[[], Sequence[nn.Module]]
        Returns a new bottom model for each party.
    fraction : float (default: 0.1)
        Fraction of the rows that is used; drawn anew in every repetition.
    epochs, batch_size : int (default: 300, 1028)
        Epochs of the training and rows of a batch.
    optimizer, aggregation : OptimizerFactory, str (default: Adam with lr 1e-4, "mean")
        For every module; how embeddings are joined.
    seed : int (default: 0)
        Seed of the rows, the models and the batches.

    Examples
    --------
    >>> from flower_vfl.objectives import SubsetTraining
    >>> labels, bottoms = torch.arange(100) % 2, lambda: [nn.Linear(3, 1)]
    >>> SubsetTraining([[torch.rand(100, 3)]], labels, bottoms, epochs=10).fraction
    0.1
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
        share = self.fraction
        require(0.0 < share <= 1.0, "fraction", "above 0 and at most 1", share)
        if self.epochs < 1 or self.batch_size < 2:
            raise ConfigError("a selection needs at least 1 epoch and batches of 2")
        if not self.features:
            raise ConfigError("a selection needs the features of at least one party")


@dataclass
class SubsetResult:
    """Train AUC, flipped leak AUC by attack, and size of the gradient's parts."""

    train_auc: float
    leak_auc: dict[str, float]
    magnitudes: dict[str, float]  # mean of the absolute entries, over all steps
    averages: dict[str, float]  # mean of the entries with their sign


@dataclass(frozen=True)
class DeltaChoice:
    """The Δ with the smallest mean ratio of leak AUC to train AUC.

    Parameters
    ----------
    delta, ratios, train_aucs : float, dict[float, float], dict[float, float]
        The selected Δ; the mean ratio and the mean train AUC of every candidate.

    Examples
    --------
    >>> from flower_vfl.objectives import DeltaChoice
    >>> DeltaChoice(0.1, {0.1: 1.1}, {0.1: 0.55}).learned  # the train AUC is too low
    False
    """

    delta: float
    ratios: dict[float, float] = field(default_factory=dict)
    train_aucs: dict[float, float] = field(default_factory=dict)

    @property
    def learned(self) -> bool:
        """Whether the model has learned the labels, so that the ratio is meaningful."""
        return self.train_aucs[self.delta] >= LEARNED


@dataclass(frozen=True)
class GammaChoice:
    """The γ that makes the two parts of the gradient equally large.

    Parameters
    ----------
    gamma, gan, ce : float
        The selected γ, and the sizes of the GAN part at γ = 1 and of the CE part.

    Examples
    --------
    >>> from flower_vfl.objectives import GammaChoice
    >>> GammaChoice(gamma=5.0, gan=0.1, ce=0.5).gamma
    5.0
    """

    gamma: float
    gan: float
    ce: float


def select_delta(
    training: SubsetTraining,
    make: Callable[[float], GAFM],
    deltas: Sequence[float] = DELTAS,
    repeats: int = 5,
) -> DeltaChoice:
    """Select the Δ that leaks least for what it learns (the paper's D.3).

    Parameters
    ----------
    training : SubsetTraining
        Parties, rows and training.
    make : Callable[[float], GAFM]
        Returns a new objective for a Δ.
    deltas : Sequence[float] (default: (0.05, 0.1, 0.2, 0.3, 0.5))
        The candidates; of equal ones the first is selected.
    repeats : int (default: 5)
        Number of trainings for each candidate, on other rows.

    Examples
    --------
    >>> from flower_vfl.objectives import GAFM, SubsetTraining, select_delta
    >>> labels, bottoms = torch.arange(100) % 2, lambda: [nn.Linear(3, 1)]
    >>> training = SubsetTraining([[torch.rand(100, 3)]], labels, bottoms, epochs=2)
    >>> choice = select_delta(training, lambda d: GAFM(1, delta=d), (0.1, 0.3), 1)
    >>> sorted(choice.ratios)
    [0.1, 0.3]
    """
    if not deltas or repeats < 1:
        raise ConfigError("a selection needs at least one delta and one repetition")
    mean = statistics.fmean
    ratios, train_aucs = {}, {}
    for delta in deltas:
        own = partial(make, delta)
        results = [train_on_subset(training, own, i) for i in range(repeats)]
        ratios[delta] = mean(mean(r.leak_auc.values()) / r.train_auc for r in results)
        train_aucs[delta] = mean(r.train_auc for r in results)
    return DeltaChoice(min(ratios, key=ratios.__getitem__), ratios, train_aucs)


def select_gamma(
    training: SubsetTraining,
    make: Callable[[float], GAFM],
    repeats: int = 1,
    literal: bool = False,
) -> GammaChoice:
    """Select the γ that balances the GAN part and the CE part (the paper's D.2).

    Parameters
    ----------
    training, make, repeats
        As for :func:`select_delta`; `make` gets a γ.
    literal : bool (default: False)
        Compare the size of the averages (the paper's Table 7), in which entries of
        opposite sign cancel, instead of the mean magnitude of the entries.

    Examples
    --------
    >>> from flower_vfl.objectives import GAFM, SubsetTraining, select_gamma
    >>> labels, bottoms = torch.arange(100) % 2, lambda: [nn.Linear(3, 1)]
    >>> training = SubsetTraining([[torch.rand(100, 3)]], labels, bottoms, epochs=2)
    >>> choice = select_gamma(training, lambda g: GAFM(1, gamma=g))
    >>> choice.gamma == choice.ce / choice.gan
    True
    """
    require(repeats >= 1, "repeats", "at least 1", repeats)
    results = [train_on_subset(training, partial(make, 1.0), i) for i in range(repeats)]
    sizes = [r.averages if literal else r.magnitudes for r in results]
    gan = abs(statistics.fmean(size["gan"] for size in sizes))
    ce = abs(statistics.fmean(size["ce"] for size in sizes))
    if not gan > 0.0:
        raise ConfigError("the GAN part is zero, so no gamma balances it; raise clip")
    return GammaChoice(ce / gan, gan, ce)


def train_on_subset(
    training: SubsetTraining, make: Callable[[], GAFM], repeat: int = 0
) -> SubsetResult:
    """Train a new model with an objective on a part of the rows and attack it."""
    count = len(training.labels)
    stream = generator(training.seed, "rehearsal", repeat)
    drawn = torch.randperm(count, generator=stream)
    used = drawn[: max(round(training.fraction * count), 2)]
    data = [[part[used] for part in party] for party in training.features]
    with RandomState(derive_seed(training.seed, "rehearsal weights", repeat)):
        objective = make()
        labels = objective.encode(training.labels[used])
        return _train(training, objective, data, labels)


def _train(
    training: SubsetTraining, objective: GAFM, data: list[list[Tensor]], labels: Tensor
) -> SubsetResult:
    # These modules import this package.
    from flower_vfl.leakage.attacks import LeakageMeter, leak_auc
    from flower_vfl.leakage.meter import FLIPPED
    from flower_vfl.parties.aggregation import Aggregation

    # The paper's three attacks, as in its tables.
    hard = ":hard=true" if objective.task == "binary" else ""
    meter = LeakageMeter(("norm", f"mean{hard}", f"median{hard}"), objective.task)
    join = Aggregation(training.aggregation)
    bottoms = nn.ModuleList(training.bottoms())
    objective.configure(training.optimizer)
    optimizer = training.optimizer(bottoms.parameters())
    leaks: dict[str, list[float]] = defaultdict(list)
    magnitudes: dict[str, list[float]] = defaultdict(list)
    averages: dict[str, list[float]] = defaultdict(list)

    def embed(rows: Tensor) -> list[Tensor]:
        both = zip(bottoms, data, strict=True)
        return [bottom(*(part[rows] for part in party)) for bottom, party in both]

    for epoch in range(1, training.epochs + 1):
        for rows in torch.split(torch.randperm(len(labels)), training.batch_size):
            parts = embed(rows)
            joined = join(parts)
            outcome = objective.step(joined.detach().requires_grad_(), labels[rows])
            sent = outcome.gradient
            gradients = torch.autograd.grad(joined, parts, sent, retain_graph=True)
            optimizer.zero_grad()
            joined.backward(sent)
            optimizer.step()
            for name, part in objective.gradient_parts.items():
                magnitudes[name].append(float(part.abs().mean()))
                averages[name].append(float(part.mean()))
            if epoch == training.epochs:
                received = {str(i): each for i, each in enumerate(gradients)}
                for each in meter.measure(received, labels[rows], epoch):
                    if each.metric == FLIPPED:
                        leaks[each.attack].append(each.value)
    bottoms.eval()
    with torch.no_grad():
        scores = objective.eval().predict(join(embed(torch.arange(len(labels)))))
    auc = leak_auc(scores, labels.long())
    if math.isnan(auc):
        raise ConfigError("all rows of the selection have one class; use more rows")
    if not leaks:
        raise ConfigError("no batch of the selection has two classes; use larger ones")
    means = (
        {name: statistics.fmean(values) for name, values in each.items()}
        for each in (leaks, magnitudes, averages)
    )
    return SubsetResult(max(auc, 1e-6), *means)
