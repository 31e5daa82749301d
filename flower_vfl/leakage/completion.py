"""Label inference attacks against vertical federated learning, the passive attack.

Fu et al., USENIX Security 2022; LADSG repeats it (table 4). After training, a passive
party puts a small head on its own bottom model. It trains the head, or both, with
MixMatch on a few auxiliary labels and all of its unlabelled rows. The completed model
then predicts the label of any row from this party's features alone. The baseline is a
model that the party trains on its auxiliary labels without taking part in anything.

Decisions, where the paper leaves something open:

- Success is that of the model at the end. The released code keeps the epoch of the best
  training success, which the attacker cannot know.
- Training success is that on the rows whose labels the attacker was not given.
- Labels are guessed from two augmentations, as in MixMatch; the released code has none.
  λ is drawn for each pair of rows, as in MixMatch, not once for a batch.
- Codes of a category and ids of tokens cannot be mixed. Where a party has any, the
  outputs of its bottom model are mixed instead of its inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.objectives.base import class_numbers, descend
from flower_vfl.parties.base import Features, as_tensors
from flower_vfl.randomness import RandomState, derive_seed

from . import mixmatch
from .mixmatch import Augment, CompletedModel, Inputs, Scores, augmentation

Metric = Literal["auto", "accuracy", "top5", "f1", "auc"]
_MANY_CLASSES = 100  # LADSG: top-5 for CIFAR-100, top-1 for ten classes


@dataclass(frozen=True)
class CompletionResult:
    """What an attack and its baselines achieved.

    Parameters
    ----------
    metric, seed : str, int
        The metric that success is measured in, and the seed of the attack.
    rows : tuple[int, ...]
        Training rows whose labels the attacker was given.
    train, test : dict[str, float] | None
        All metrics of the attack; ``test`` is None without test rows.
    baseline_train, baseline_test : dict[str, float] | None
        The same for a model trained on the auxiliary labels alone.

    Examples
    --------
    >>> found = {"accuracy": 0.9}
    >>> CompletionResult("accuracy", 0, (1, 2), found, None, found, None).train_success
    0.9
    """

    metric: str
    seed: int
    rows: tuple[int, ...]
    train: Scores
    test: Scores | None
    baseline_train: Scores
    baseline_test: Scores | None

    @property
    def train_success(self) -> float:
        """Success on the training rows whose labels were not given."""
        return self.train.get(self.metric, math.nan)  # rows of one class have no AUC

    @property
    def test_success(self) -> float | None:
        """Success on the test rows."""
        return None if self.test is None else self.test.get(self.metric, math.nan)

    @property
    def baseline_train_success(self) -> float:
        """Success of the auxiliary labels alone on the training rows."""
        return self.baseline_train.get(self.metric, math.nan)

    @property
    def baseline_test_success(self) -> float | None:
        """Success of the auxiliary labels alone on the test rows."""
        scores = self.baseline_test
        return None if scores is None else scores.get(self.metric, math.nan)


@dataclass(frozen=True)
class ModelCompletion:
    """The attack with its settings.

    Parameters
    ----------
    labels : int (default: 40)
        Number of auxiliary labels in all, as many of each class. LADSG, table 4, has 5
        for each class of CIFAR-10, CIFAR-100 and CINIC-10, 10 of Yahoo, 50 of Loan and
        30 of BHI; its abstract and Fu et al. have 40 for CIFAR-10.
    steps : int (default: 5120)
        Training steps; the released code takes 5 × 1024 for CIFAR-10.
    temperature, alpha : float (default: 0.8, 0.75)
        T, which sharpens guessed labels, and α of the mixing weights.
    lambda_u : float (default: 50.0)
        Weight of the unlabelled loss at the end of its linear ramp over all steps. With
        two classes 50 lets the model believe its own guesses until it predicts one
        class for all rows (Spambase, credit default); 5 did not.
    ema : float (default: 0.999)
        Decay of the moving average of the weights, which is what predicts.
    lr, batch_size : float, int (default: 2e-3, 32)
        Learning rate of Adam; rows of a labelled and of an unlabelled batch.
    augmentations : int (default: 2)
        Augmentations of an unlabelled row.
    head : tuple[int, ...] (default: ())
        Widths of the layers of the head before that of the logits.
    freeze_bottom : bool (default: False)
        Whether only the head is trained; the baselines train everything all the same.
        So in LADSG, equation 3, and in the released code for Criteo. It was the
        stronger attack on tables and on CIFAR-10, not on digits.
    mix_inputs : bool (default: True)
        Whether rows are mixed where they enter, as in MixMatch; if not, at the cut
        layer, which is always done where a party has codes. With a frozen bottom model
        noise is then added there, too, and the bottom model runs once for each row:
        the same success on CIFAR-10 in a fraction of the time.
    shift, flip, noise : int, bool, float (default: 2, False, 0.1)
        See :func:`~flower_vfl.leakage.mixmatch.augmentation`.
    metric : str (default: "auto")
        What success means: ``"accuracy"``, ``"top5"``, ``"f1"`` or ``"auc"``. As in
        LADSG, ``"auto"`` is F1 for two classes, top-5 for 100 and more, else accuracy.
    seed : int (default: 0)
        Decides which labels are known and everything that is random.

    Examples
    --------
    >>> labels = torch.arange(60) % 2
    >>> inputs = torch.randn(60, 3) + 4.0 * labels[:, None]
    >>> attack = ModelCompletion(labels=10, steps=30, lambda_u=5.0, freeze_bottom=True)
    >>> result = attack.run(nn.Linear(3, 4), inputs, labels, classes=2)
    >>> result.metric, len(result.rows), sorted(result.train)
    ('f1', 10, ['accuracy', 'auc', 'f1'])
    """

    labels: int = 40
    steps: int = 5120
    temperature: float = 0.8
    alpha: float = 0.75
    lambda_u: float = 50.0
    ema: float = 0.999
    lr: float = 2e-3
    batch_size: int = 32
    augmentations: int = 2
    head: tuple[int, ...] = ()
    freeze_bottom: bool = False
    mix_inputs: bool = True
    shift: int = 2
    flip: bool = False
    noise: float = 0.1
    metric: Metric = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"labels": 2, "steps": 1, "batch_size": 2, "augmentations": 1}
        least |= dict.fromkeys(("alpha", "lambda_u", "shift", "noise"), 0)
        for name, value in least.items():
            given = getattr(self, name)
            require(given >= value, name, f"at least {value}", given)
        wide = all(width >= 1 for width in self.head)
        require(wide, "widths of the head", "at least 1", self.head)
        require(0.0 <= self.ema < 1.0, "ema", "at least 0 and below 1", self.ema)
        for name in ("temperature", "lr"):
            given = getattr(self, name)
            require(given > 0.0, name, "above 0", given)

    def run(
        self,
        bottom: nn.Module,
        inputs: Features,
        labels: Tensor,
        classes: int,
        test_inputs: Features | None = None,
        test_labels: Tensor | None = None,
        fresh: Callable[[], nn.Module] | None = None,
        augment: Augment | None = None,
    ) -> CompletionResult:
        """Attack one party and return what it achieved.

        Parameters
        ----------
        bottom, inputs : nn.Module, Features
            The party's trained bottom model, which is copied, and its training rows.
        labels, classes : Tensor, int
            Labels of these rows, to pick auxiliary ones and to score; how many classes.
        test_inputs, test_labels : Features | None, Tensor | None (default: None)
            Rows that nobody trained on, to score.
        fresh : Callable[[], nn.Module] | None (default: None)
            Makes an untrained bottom model for the baselines; None draws new weights.
        augment : Augment | None (default: None)
            Takes and returns a batch of inputs; None fits it to them.
        """
        metric = self._metric(classes)
        rows, held = as_tensors(inputs), as_tensors(test_inputs)
        truth = _class_numbers(labels, classes, rows)
        asked = None
        if held and test_labels is not None:
            asked = _class_numbers(test_labels, classes, held)
        known = mixmatch.auxiliary_rows(truth, classes, self.labels, self.seed)
        rest = torch.ones_like(truth).index_fill(0, known, 0).nonzero()[:, 0]
        if len(rest) < 2:
            raise ConfigError(f"{self.labels} auxiliary labels leave nothing to infer")
        change = augment or augmentation(rows, self.shift, self.flip, self.noise)
        data = _Data(rows, truth, classes, known, rest, held, asked, change)
        trained: Callable[[], nn.Module] = partial(copy.deepcopy, bottom)
        untrained = fresh or partial(mixmatch.reinitialise, bottom)
        baseline = self._attempt("baseline", untrained, data, semi=False)
        if self.freeze_bottom and not self.mix_inputs and augment is None:
            data, trained = data.embedded(trained(), self.noise), nn.Identity
        attack = self._attempt("attack", trained, data, self.freeze_bottom)
        given = tuple(known.tolist())
        return CompletionResult(metric, self.seed, given, *attack, *baseline)

    def _attempt(
        self,
        purpose: str,
        start: Callable[[], nn.Module],
        data: _Data,
        freeze: bool = False,
        semi: bool = True,
    ) -> tuple[Scores, Scores | None]:
        device = data.truth.device
        with RandomState(derive_seed(self.seed, "completion", purpose), device):
            bottom = start().to(device).eval()
            with torch.no_grad():
                width = bottom(*data.take(data.known)).flatten(1).shape[1]
            model = CompletedModel(bottom, width, data.classes, self.head, freeze)
            average = self._train(model.to(device), data, semi)
            guesses = mixmatch.predict(average, data.take(data.rest))
            train = mixmatch.completion_scores(guesses, data.truth[data.rest])
            if data.asked is None:
                return train, None
            guesses = mixmatch.predict(average, data.held)
            return train, mixmatch.completion_scores(guesses, data.asked)

    def _train(self, model: CompletedModel, data: _Data, semi: bool) -> nn.Module:
        """Train with MixMatch, or on the auxiliary labels alone; return the average."""
        average = copy.deepcopy(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=self.lr)
        known = mixmatch.cycle(data.known, self.batch_size)
        rest = mixmatch.cycle(data.rest, self.batch_size)
        model.train()
        for step in range(1, self.steps + 1):
            rows = next(known)
            labelled = data.augment(data.take(rows))
            targets = F.one_hot(data.truth[rows], data.classes).float()
            if semi:
                chosen = data.take(next(rest))
                views = [data.augment(chosen) for _ in range(self.augmentations)]
                settings = self.temperature, self.alpha, self.mix_inputs
                sure, unsure = mixmatch.mixmatch_losses(
                    model.embed, model.head, labelled, targets, views, *settings
                )
                loss = sure + self.lambda_u * (step / self.steps) * unsure
            else:
                loss = F.cross_entropy(model(*labelled), targets)
            descend([optimizer], loss)
            mixmatch.update_average(average, model, self.ema, step)
        return average

    def _metric(self, classes: int) -> str:
        if self.metric == "auto":
            many = "top5" if classes >= _MANY_CLASSES else "accuracy"
            return "f1" if classes == 2 else many
        known = {"accuracy"} | ({"f1", "auc"} if classes == 2 else set())
        known |= {"top5"} if classes > 5 else set()
        check_name(f"metric for {classes} classes", self.metric, known)
        return self.metric


@dataclass(frozen=True)
class _Data:
    """What an attack works on: rows are of training, held and asked of the test."""

    rows: Inputs
    truth: Tensor
    classes: int
    known: Tensor
    rest: Tensor
    held: Inputs
    asked: Tensor | None
    augment: Augment

    def take(self, rows: Tensor) -> Inputs:
        return tuple(part[rows] for part in self.rows)

    def embedded(self, bottom: nn.Module, noise: float) -> _Data:
        """Return the same data with a bottom model's outputs as its rows."""
        bottom = bottom.to(self.truth.device)
        rows = (mixmatch.outputs(bottom, self.rows),)
        held = (mixmatch.outputs(bottom, self.held),) if self.held else ()
        change = augmentation(rows, noise=noise)
        return replace(self, rows=rows, held=held, augment=change)


def _class_numbers(labels: Tensor, classes: int, inputs: Inputs) -> Tensor:
    if len(labels) != len(inputs[0]):
        raise ConfigError(f"{len(labels)} labels for {len(inputs[0])} rows of features")
    return class_numbers(labels, classes).to(inputs[0].device).long()
