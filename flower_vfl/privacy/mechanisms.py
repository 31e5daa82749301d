"""Mechanisms that randomise labels, each with what it promises for every label.

A draw is a function of a secret key, the row's id, the mechanism and the label: the
same after a restart and in a second training with the same key. Two draws that could
be told apart in any of these have nothing in common.

- Warner (1965), Randomized response; Ghazi et al. (2021), Deep learning with label
  differential privacy, for a prior. https://arxiv.org/abs/2102.06062
- Dwork et al. (2006) for Laplace noise; Dong et al. (2022), Gaussian differential
  privacy. https://arxiv.org/abs/1905.02383
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from flower_vfl.errors import require
from flower_vfl.randomness import derive_key

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
    @abstractmethod
    def auc_bound(self) -> float:
        """What no attack's AUC between two labels of one row exceeds."""

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
    def auc_bound(self) -> float:
        """e^ε/(1 + e^ε), which two classes reach."""
        return 1.0 / (1.0 + math.exp(-self.epsilon))

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

    @property
    def auc_bound(self) -> float:
        """That of the two ends of the range."""
        return 1.0 - (2.0 + self.epsilon) * math.exp(-self.epsilon) / 4.0

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

    @property
    def auc_bound(self) -> float:
        """Φ(μ/√2)."""
        return float(norm.cdf((self.mu or 0.0) / math.sqrt(2.0)))

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


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the δ of μ-GDP for an ε (Dong et al., corollary 1)."""
    first = norm.cdf(mu / 2.0 - epsilon / mu)
    return float(first - math.exp(epsilon) * norm.cdf(-mu / 2.0 - epsilon / mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the ε of μ-GDP for a δ; 0 if δ alone suffices."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    most = mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta)) + 1.0
    return float(brentq(lambda e: gaussian_delta(e, mu) - delta, 0.0, most))


def laplace_epsilon(auc: float) -> float:
    """Return the ε of Laplace noise with an AUC bound."""
    return float(brentq(lambda e: Laplace(e, 0.0, 1.0).auc_bound - auc, 1e-9, 700.0))


def gaussian_mu(auc: float | None, epsilon: float | None, delta: float) -> float:
    """Return the μ of Gaussian noise with an AUC bound, or with an ε for a δ."""
    if auc is not None:
        return float(math.sqrt(2.0) * norm.ppf(auc))
    assert epsilon is not None  # one of the two is given
    most = math.sqrt(2.0 * epsilon) + 1.0  # where even δ = 1/2 would not suffice
    return float(brentq(lambda m: gaussian_epsilon(m, delta) - epsilon, 1e-6, most))
