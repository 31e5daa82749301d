"""Label differential privacy: how labels are randomised, and what is promised.

A draw is a function of a secret key, the row's id, the mechanism and the label: the
same after a restart and in a second training with the same key. Two draws that could
be told apart in any of these have nothing in common.

- Warner (1965), Randomized response; Ghazi et al. (2021), Deep learning with label
  differential privacy, for a prior. https://arxiv.org/abs/2102.06062
- Dwork et al. (2006) for Laplace noise; Dong et al. (2022), Gaussian differential
  privacy. https://arxiv.org/abs/1905.02383
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.randomness import derive_key
from flower_vfl.specs import build_from_spec

from .accountant import Release, compose, gaussian_epsilon, laplace_auc, root

if TYPE_CHECKING:
    from flower_vfl.objectives import Task

Kind = Literal["auto", "randomised-response", "laplace", "gaussian"]
Loss = Literal["auto", "plain", "unbiased", "forward"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
DEFAULT_LOSS: Loss = "forward"  # where no validation rows can choose
_GRID = 2.0**-16  # noisy labels are multiples of this part of their range
_BYTES = 8  # of each uniform number


def row_uniforms(
    key: int, ids: Iterable[object], labels: Iterable[float], use: str, columns: int
) -> Tensor:
    """Return numbers in (0, 1), one row for each id, that only the key can repeat."""
    secret = derive_key(key, "labels", use)
    blocks = -(-columns * _BYTES // hashlib.blake2b.MAX_DIGEST_SIZE)
    size = min(columns * _BYTES, hashlib.blake2b.MAX_DIGEST_SIZE)
    raw = bytearray()
    for row, label in zip(ids, labels, strict=True):
        text = f"{label!r}\x1f{row}".encode()
        for block in range(blocks):
            salt = block.to_bytes(8, "big")
            hashed = hashlib.blake2b(text, key=secret, digest_size=size, salt=salt)
            raw += hashed.digest()
    whole = np.frombuffer(bytes(raw), dtype=np.uint64).reshape(-1, blocks * size // 8)
    return torch.from_numpy(((whole[:, :columns] >> 11) + 0.5) * 2.0**-53)


class Mechanism(ABC):
    """Randomises labels once; `epsilon`, `delta` and `auc_bound` are its promise."""

    name: str
    epsilon: float
    delta: float = 0.0
    mu: float | None = None  # of Gaussian differential privacy
    columns: int = 2  # uniform numbers for each row

    @property
    def release(self) -> Release:
        """What the randomised labels reveal."""
        epsilon = None if self.mu else self.epsilon
        return Release(self.name, epsilon, self.mu, delta=self.delta, draws=self.text)

    @property
    def auc_bound(self) -> float:
        """What no attack's AUC between two labels of one row exceeds."""
        return compose([self.release])[2]

    @abstractmethod
    def apply(self, labels: Tensor, uniform: Tensor) -> Tensor:
        """Return randomised labels: class numbers, values, or noisy one-hot rows."""

    @property
    def text(self) -> str:
        """Everything that the draws depend on, besides key, id and label."""
        return f"{self.name}:{self.epsilon!r},{self.delta!r}"

    def randomise(self, labels: Tensor, ids: Iterable[object], key: int) -> Tensor:
        """Return the randomised labels of some rows."""
        values = labels.detach().cpu().double()
        given = values.tolist(), self.text, self.columns
        return self.apply(values, row_uniforms(key, ids, *given))


class RandomizedResponse(Mechanism):
    """Keeps a class with probability e^ε/(e^ε + k − 1), or draws another one.

    With a `prior`, only the k most likely classes are answered, with the k that makes a
    right answer most likely; a label outside of them gets any of the k.
    """

    name = "randomised-response"

    def __init__(
        self, epsilon: float, classes: int = 2, prior: tuple[float, ...] = ()
    ) -> None:
        require(0.0 < epsilon < math.inf, "epsilon", "a number above 0", epsilon)
        self.epsilon, self.classes, self.prior = epsilon, classes, prior
        order = np.arange(classes)
        if prior:
            fits = len(prior) == classes and min(prior) >= 0.0 and sum(prior) > 0.0
            require(fits, "prior", f"{classes} weights, one for each class", prior)
            shares = np.asarray(prior)
            order = np.argsort(-shares, kind="stable")
            sizes = np.arange(1, classes + 1)
            odds = np.exp(epsilon) / (np.exp(epsilon) + sizes - 1)
            order = order[: int(np.argmax(odds * shares[order].cumsum())) + 1]
        self.answers = torch.from_numpy(np.sort(order))
        self.keep = 1.0 / (1.0 + (len(order) - 1) * math.exp(-epsilon))

    @property
    def text(self) -> str:
        """The classes, too."""
        return f"{super().text},{self.classes},{self.answers.tolist()}"

    @property
    def invertible(self) -> bool:
        """Whether every class may be answered."""
        return len(self.answers) == self.classes

    @property
    def channel(self) -> Tensor:
        """The probability of each answer (column) for each class (row)."""
        k = len(self.answers)
        table = torch.zeros(self.classes, self.classes, dtype=torch.float64)
        table[:, self.answers] = 1.0 / k
        if k > 1:
            own = torch.full((k, k), (1.0 - self.keep) / (k - 1), dtype=torch.float64)
            table[self.answers[:, None], self.answers] = own.fill_diagonal_(self.keep)
        return table

    def apply(self, labels: Tensor, uniform: Tensor) -> Tensor:
        """Return class numbers."""
        k, classes = len(self.answers), labels.long()
        place = torch.full((self.classes,), -1)
        place[self.answers] = torch.arange(k)
        own, inside = place[classes], place[classes] >= 0
        other = (uniform[:, 1] * (k - 1)).long()
        other = torch.where(other >= own, other + 1, other).clamp_max(k - 1)
        answer = torch.where(uniform[:, 0] < self.keep, own, other)
        any_of_them = (uniform[:, 1] * k).long().clamp_max(k - 1)
        return self.answers[torch.where(inside, answer, any_of_them)]


class Laplace(Mechanism):
    """Adds Laplace noise of scale range/ε to a value that is clipped to its range."""

    name = "laplace"
    columns = 1

    def __init__(self, epsilon: float, low: float, high: float) -> None:
        require(0.0 < epsilon < math.inf, "epsilon", "a number above 0", epsilon)
        self.epsilon, self.low, self.high = epsilon, low, high

    @property
    def text(self) -> str:
        """The range, too."""
        return f"{super().text},{self.low!r},{self.high!r}"

    def apply(self, labels: Tensor, uniform: Tensor) -> Tensor:
        """Return values on a grid, so that their last digits tell nothing."""
        width = self.high - self.low
        share = (labels.clamp(self.low, self.high) - self.low) / width
        centred = uniform[:, 0] - 0.5
        noise = -centred.sign() * torch.log1p(-2.0 * centred.abs()) / self.epsilon
        return self.low + width * (_on_grid(share) + _on_grid(noise))


class Gaussian(Mechanism):
    """Adds normal noise to a binary label, or to a one-hot row: (ε, δ), or μ-GDP."""

    name = "gaussian"

    def __init__(
        self,
        mu: float,
        delta: float,
        classes: int = 2,
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        require(0.0 < mu < math.inf, "mu", "a number above 0", mu)
        require(0.0 < delta < 1.0, "delta", "between 0 and 1", delta)
        self.mu, self.delta, self.classes = mu, delta, classes
        self.low, self.high = low, high
        # Two one-hot rows are √2 apart, two binary labels 1.
        self.sigma = (math.sqrt(2.0) if classes > 2 else 1.0) / mu
        self.columns = classes if classes > 2 else 1
        self.epsilon = gaussian_epsilon(mu, delta)

    @property
    def text(self) -> str:
        """The noise and the classes; δ only says how ε is stated."""
        return f"{self.name}:{self.mu!r},{self.classes},{self.low!r},{self.high!r}"

    def apply(self, labels: Tensor, uniform: Tensor) -> Tensor:
        """Return noisy labels, or noisy one-hot rows, on a grid."""
        noise = _on_grid(self.sigma * torch.special.ndtri(uniform))
        if self.classes > 2:
            return torch.nn.functional.one_hot(labels.long(), self.classes) + noise
        width = self.high - self.low
        share = (labels.clamp(self.low, self.high) - self.low) / width
        return self.low + width * (_on_grid(share) + noise[:, 0])


def _on_grid(values: Tensor) -> Tensor:
    """Round to the grid: a sum of two such values is exact, whatever it is a sum of."""
    return (values / _GRID).round() * _GRID


def laplace_epsilon(auc: float) -> float:
    """Return the ε of Laplace noise with an AUC bound."""
    return root(lambda e: laplace_auc(e) - auc, 1e-9, 700.0)


def gaussian_mu(auc: float | None, epsilon: float | None, delta: float) -> float:
    """Return the μ of Gaussian noise with an AUC bound, or with an ε for a δ."""
    if auc is not None:
        return math.sqrt(2.0) * NormalDist().inv_cdf(auc)
    assert epsilon is not None  # one of the two is given
    most = math.sqrt(2.0 * epsilon) + 1.0  # where even δ = 1/2 would not suffice
    return root(lambda m: gaussian_epsilon(m, delta) - epsilon, 1e-6, most)


@dataclass(frozen=True)
class LabelPrivacy:
    """How labels are randomised, once and before training, and what is promised.

    Over the whole training, for all parties together, the server and the trained model:
    two worlds that differ in one training label are told apart with at most this AUC,
    or change the odds of that label by at most a factor e^ε. See docs/guarantees.md.

    Parameters
    ----------
    auc : float | None (default: None)
        The AUC that is promised, between 0.5 and 1. Give this or `epsilon`.
    epsilon : float | None (default: None)
        ε of label differential privacy.
    mechanism : {"auto", "randomised-response", "laplace", "gaussian"}
        ``"auto"`` takes randomised response for classes and Laplace for a regression.
    loss : {"auto", "plain", "unbiased", "forward"} (default: "auto")
        ``"plain"`` learns randomised labels as they are, ``"unbiased"`` corrects by
        the inverse of the mechanism, ``"forward"`` maximises their likelihood through
        it (for a regression: the absolute error). ``"auto"`` keeps the best of these by
        randomised validation labels; without validation rows it takes ``"forward"``.
    delta : float (default: 1e-5)
        δ for which the ε of Gaussian noise is meant.
    prior : tuple[float, ...] (default: ())
        Publicly known shares of the classes: unlikely ones may then never be answered.
    low, high : float | None (default: None)
        Range of the labels of a regression, publicly known; values are clipped to it.
    key : int | None (default: None)
        The secret that draws are made from, of up to 256 bits; None draws one for every
        run. Trainings with the same key reveal no more than one of them.
    ledger : str (default: "")
        A file of the label party with the key, and what trainings have revealed so far.
    budget : str (default: "")
        ``"auc=0.7"`` or ``"epsilon=1"``: refuse a run that cannot promise it, together
        with earlier ones in the ledger. May stand without `auc` and `epsilon`.
    canaries : int (default: 0)
        Training rows whose label is one of two at random, to measure how well these
        are told apart; an audit, which makes the model a little worse.

    Examples
    --------
    >>> from flower_vfl import LabelPrivacy
    >>> privacy = LabelPrivacy(auc=0.65)
    >>> round(privacy.mechanism_for("binary", 2).epsilon, 2)
    0.62
    >>> LabelPrivacy.from_text("epsilon=1,loss=plain").loss
    'plain'
    """

    auc: float | None = None
    epsilon: float | None = None
    mechanism: Kind = "auto"
    loss: Loss = "auto"
    delta: float = 1e-5
    prior: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    key: int | None = None
    ledger: str = ""
    budget: str = ""
    canaries: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        limits = [each for each in (self.auc, self.epsilon) if each is not None]
        if len(limits) > 1 or not (limits or self.budget or self.canaries):
            raise ConfigError("label privacy takes either auc=0.65 or epsilon=1")
        if self.budget:
            self.budget_limit()
        check_name("mechanism", self.mechanism, get_args(Kind))
        check_name("loss of private labels", self.loss, LOSSES)
        if self.auc is not None:
            require(0.5 < self.auc < 1.0, "auc", "between 0.5 and 1", self.auc)
        if self.epsilon is not None:
            require(self.epsilon > 0.0, "epsilon", "above 0", self.epsilon)
        require(0.0 < self.delta < 0.1, "delta", "between 0 and 0.1", self.delta)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the settings of a config string, e.g. ``"auc=0.65,loss=plain"``."""
        return build_from_spec("setting", f"label-dp:{text}", {"label-dp": cls})

    def budget_limit(self) -> tuple[str, float]:
        """Return what the budget limits, and to how much."""
        name, _, value = self.budget.partition("=")
        check_name("kind of label budget", name.strip(), ("auc", "epsilon"))
        try:
            return name.strip(), float(value)
        except ValueError:
            raise ConfigError(f"'{self.budget}' is not a budget like auc=0.7") from None

    def mechanism_for(self, task: Task, classes: int) -> Mechanism | None:
        """Return the mechanism for a kind of labels; None if none is asked for."""
        if self.auc is None and self.epsilon is None:
            return None
        kind, regression = self.mechanism, task == "regression"
        if kind == "auto":
            kind = "laplace" if regression else "randomised-response"
        if regression != (kind == "laplace") and kind != "gaussian":
            raise ConfigError(f"the mechanism '{kind}' is not for a {task} task")
        low, high = 0.0, 1.0
        if regression:
            if self.low is None or self.high is None or not self.low < self.high:
                needed = "a regression needs a public range, low=... and high=..."
                raise ConfigError(f"{needed}; one taken from labels would reveal them")
            low, high = self.low, self.high
        if kind == "gaussian":
            mu = gaussian_mu(self.auc, self.epsilon, self.delta)
            return Gaussian(mu, self.delta, 0 if regression else classes, low, high)
        if kind == "laplace":
            return Laplace(self.epsilon or laplace_epsilon(self.auc or 0.0), low, high)
        epsilon = self.epsilon
        if epsilon is None:
            epsilon = float(torch.logit(torch.tensor(self.auc, dtype=torch.float64)))
        return RandomizedResponse(epsilon, classes, self.prior)
