"""Synthetic embeddings for aligned rows whose features a party does not hold.

Sun et al., Vertical Federated Learning without Revealing Intersection Membership
(FLORIST), section 2.4 and 3.2. https://arxiv.org/abs/2106.05508

Draws come from a secret of the party: whoever could repeat them would know which rows
are synthetic. By default a row keeps its synthetic features for the whole run. With new
ones in every epoch, its embedding would jump between epochs, while the embedding of a
real row drifts with the model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.randomness import noise_generator
from flower_vfl.specs import build_from_spec

RunModel = Callable[[Tensor], Tensor]  # own row numbers -> embeddings
Averages = tuple[Tensor, Tensor]  # mean and standard deviation of every entry


def draw_donors(count: int, pool: Tensor, generator: torch.Generator) -> Tensor:
    """Return random rows of a pool, each again only after all others."""
    rounds = [
        torch.randperm(len(pool), generator=generator)
        for _ in range(math.ceil(count / len(pool)))
    ]
    order = torch.cat(rounds)[:count] if rounds else torch.empty(0, dtype=torch.int64)
    return pool[order.to(pool.device)]


def gaussian_embeddings(
    count: int, real: Tensor, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """Return rows of N(0, scale/d · max‖f‖² · I), f the real embeddings."""
    largest: Tensor = real.detach().flatten(1).norm(dim=1).max()
    deviation = largest * math.sqrt(scale / real[0].numel())
    return _normal((count, *real.shape[1:]), real, generator) * deviation


def random_embeddings(
    count: int, mean: Tensor, deviation: Tensor, generator: torch.Generator
) -> Tensor:
    """Return rows of N(mean, deviation²), entry by entry."""
    return mean + deviation * _normal((count, *mean.shape), mean, generator)


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


@dataclass(frozen=True)
class AlignedBatch:
    """Aligned rows to embed."""

    rows: Tensor
    at: tuple[int | str, ...]  # seeds what is drawn for this batch
    training: bool


class FeatureSynthesizer(ABC):
    """Embeds aligned rows, and makes synthetic embeddings for missing ones."""

    def __init__(self) -> None:
        self._local = torch.empty(0, dtype=torch.int64)
        self._pool = self._local
        self._secret = 0

    def fit(self, local: Tensor, pool: Tensor, secret: int) -> None:
        """Set the rows that the party holds; called before the first batch."""
        if not len(pool) and bool((local < 0).any()):
            raise ConfigError(
                "it holds none of the training rows, and so cannot make synthetic "
                "features from them"
            )
        self._local, self._pool, self._secret = local, pool, secret

    def _generator(self, *at: int | str) -> torch.Generator:
        return noise_generator(self._secret, "features", *at)

    @abstractmethod
    def embed(self, batch: AlignedBatch, run: RunModel) -> Tensor:
        """Return one embedding for each row of a batch."""

    def commit(self) -> None:  # noqa: B027  # most have no state
        """Update the state after a completed training step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the last completed step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Load a saved state."""


class Sampling(FeatureSynthesizer):
    """The features of a random real row, which the model embeds and trains on."""

    def __init__(self, fixed: bool = True) -> None:
        super().__init__()
        self.fixed = fixed

    def fit(self, local: Tensor, pool: Tensor, secret: int) -> None:
        """Set the rows that the party holds, and draw a donor for each missing one."""
        super().fit(local, pool, secret)
        if self.fixed:
            self._local = self._filled(local, self._generator("rows"))

    def _filled(self, local: Tensor, generator: torch.Generator) -> Tensor:
        absent = (local < 0).nonzero().flatten()
        if not len(absent):
            return local
        return local.index_copy(
            0, absent, draw_donors(len(absent), self._pool, generator)
        )

    def embed(self, batch: AlignedBatch, run: RunModel) -> Tensor:
        """Return one embedding for each row of a batch."""
        local = self._local.index_select(0, batch.rows)
        return run(self._filled(local, self._generator(*batch.at)))


class _RandomEmbeddings(FeatureSynthesizer):
    """Embeddings drawn at random, whose gradient is not used."""

    def embed(self, batch: AlignedBatch, run: RunModel) -> Tensor:
        """Return one embedding for each row of a batch."""
        local = self._local.index_select(0, batch.rows)
        held = (local >= 0).nonzero().flatten()
        if len(held) == len(local):
            output = run(local)
            self._record(output.detach(), batch.training)
            return output
        generator = self._generator(*batch.at)
        own = local[held]
        if len(own) < 2:  # batch normalisation cannot train on one row
            others = max(2, len(local)) - len(own)
            own = torch.cat([own, draw_donors(others, self._pool, generator)])
        real = run(own)
        self._record(real.detach(), batch.training)
        drawn = self._draw(len(local), real.detach(), generator)
        return drawn.index_copy(0, held, real[: len(held)])

    def _record(self, real: Tensor, training: bool) -> None:
        """Record the real embeddings of a batch."""

    @abstractmethod
    def _draw(self, count: int, real: Tensor, generator: torch.Generator) -> Tensor:
        """Return so many embeddings."""


class Gaussian(_RandomEmbeddings):
    """Embeddings of N(0, s/d · max‖f‖² · I), f the real ones of the batch."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        if not scale > 0.0:
            raise ConfigError(f"scale must be positive, got {scale}")
        self.scale = scale

    def _draw(self, count: int, real: Tensor, generator: torch.Generator) -> Tensor:
        return gaussian_embeddings(count, real, generator, self.scale)


class Random(_RandomEmbeddings):
    """Embeddings with the moving mean and standard deviation of real ones."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        if not 0.0 < momentum <= 1.0:
            raise ConfigError(f"momentum must be above 0 and up to 1, got {momentum}")
        self.momentum = momentum
        self._moving: Averages | None = None  # after the last completed step
        self._next: Averages | None = None  # with the current batch

    def _record(self, real: Tensor, training: bool) -> None:
        self._next = self._moving
        if not training and self._moving is not None:
            return
        mean, deviation = real.mean(dim=0), real.std(dim=0, correction=0)
        if self._moving is not None:
            mean = self._moving[0].lerp(mean, self.momentum)
            deviation = self._moving[1].lerp(deviation, self.momentum)
        self._next = mean, deviation

    def _draw(self, count: int, real: Tensor, generator: torch.Generator) -> Tensor:
        assert self._next is not None  # _record was called before
        return random_embeddings(count, *self._next, generator)

    def fit(self, local: Tensor, pool: Tensor, secret: int) -> None:
        """Set the rows that the party holds, and reset the averages."""
        super().fit(local, pool, secret)
        self._moving = self._next = None

    def commit(self) -> None:
        """Update the averages after a completed training step."""
        self._moving = self._next

    def state_dict(self) -> dict[str, Any]:
        """Return the moving averages."""
        return {} if self._moving is None else {"moving": list(self._moving)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        device, moving = self._local.device, state.get("moving")
        self._moving = None
        if moving is not None:
            self._moving = moving[0].to(device), moving[1].to(device)


FEATURE_SYNTHESIZERS: dict[str, Callable[..., FeatureSynthesizer]] = {
    "sampling": Sampling,
    "gaussian": Gaussian,
    "random": Random,
}


def build_feature_synthesizer(text: str) -> FeatureSynthesizer:
    """Return a synthesizer by name, e.g. ``"sampling:fixed=false"``."""
    return build_from_spec("kind of synthetic features", text, FEATURE_SYNTHESIZERS)
