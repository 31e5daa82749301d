"""The aligned rows of a party, and synthetic embeddings for those that it lacks.

Sun et al., Vertical Federated Learning without Revealing Intersection Membership
(FLORIST), section 2.4 and 3.2. https://arxiv.org/abs/2106.05508

Draws come from a secret of the party: whoever could repeat them would know which rows
are synthetic. By default a row keeps its synthetic features for the whole run: with new
ones in every epoch its embedding would jump, while that of a real row drifts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError, at_party, require
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.randomness import Noise, derive_seed, draw_secret
from flower_vfl.specs import build_from_spec

from .row_index import RowIndex

At = tuple[int | str, ...]  # seeds what is drawn for a batch
RunModel = Callable[[Tensor], Tensor]  # own row numbers -> embeddings
Averages = tuple[Tensor, Tensor]  # mean and standard deviation of every entry


def draw_donors(count: int, pool: Tensor, stream: Noise) -> Tensor:
    """Return random rows of a pool, each again only after all others."""
    rounds = [stream.permutation(len(pool)) for _ in range(0, count, len(pool))]
    order = torch.cat(rounds)[:count] if rounds else torch.empty(0, dtype=torch.int64)
    return pool[order.to(pool.device)]


class FeatureSynthesizer(ABC):
    """Embeds aligned rows, and makes synthetic embeddings for missing ones."""

    def __init__(self) -> None:
        self._local = torch.empty(0, dtype=torch.int64)
        self._pool = self._local
        self._secret = 0

    def fit(self, local: Tensor, pool: Tensor, secret: int) -> None:
        """Set the rows that the party holds; called before the first batch."""
        if not len(pool) and bool((local < 0).any()):
            raise ConfigError("it holds none of the training rows to draw from")
        self._local, self._pool, self._secret = local, pool, secret

    def _stream(self, *at: int | str) -> Noise:
        return Noise(self._secret, "features", *at)

    @abstractmethod
    def embed(self, rows: Tensor, at: At, training: bool, run: RunModel) -> Tensor:
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
            self._local = self._filled(local, self._stream("rows"))

    def _filled(self, local: Tensor, stream: Noise) -> Tensor:
        absent = (local < 0).nonzero().flatten()
        if not len(absent):
            return local
        donors = draw_donors(len(absent), self._pool, stream)
        return local.index_copy(0, absent, donors)

    def embed(self, rows: Tensor, at: At, training: bool, run: RunModel) -> Tensor:
        """Return one embedding for each row of a batch."""
        local = self._local.index_select(0, rows)
        return run(self._filled(local, self._stream(*at)))


class _RandomEmbeddings(FeatureSynthesizer):
    """Embeddings drawn at random, whose gradient is not used."""

    def embed(self, rows: Tensor, at: At, training: bool, run: RunModel) -> Tensor:
        """Return one embedding for each row of a batch."""
        local = self._local.index_select(0, rows)
        held = (local >= 0).nonzero().flatten()
        if len(held) == len(local):
            output = run(local)
            self._record(output.detach(), training)
            return output
        stream = self._stream(*at)
        own = local[held]
        if len(own) < 2:  # batch normalisation cannot train on one row
            others = max(2, len(local)) - len(own)
            own = torch.cat([own, draw_donors(others, self._pool, stream)])
        real = run(own)
        self._record(real.detach(), training)
        normal = stream.normal((len(local), *real.shape[1:])).to(real)
        drawn = self.scaled(normal, real.detach())
        return drawn.index_copy(0, held, real[: len(held)])

    def _record(self, real: Tensor, training: bool) -> None:
        """Record the real embeddings of a batch."""

    @abstractmethod
    def scaled(self, normal: Tensor, real: Tensor) -> Tensor:
        """Return embeddings made of standard normal numbers and real embeddings."""


class Gaussian(_RandomEmbeddings):
    """Embeddings of N(0, s/d · max‖f‖² · I), f the real ones of the batch."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        require(scale > 0.0, "scale", "positive", scale)
        self.scale = scale

    def scaled(self, normal: Tensor, real: Tensor) -> Tensor:
        """Return embeddings by the largest norm of the real ones."""
        largest: Tensor = real.flatten(1).norm(dim=1).max()
        return normal * (largest * math.sqrt(self.scale / real[0].numel()))


class Random(_RandomEmbeddings):
    """Embeddings with the moving mean and standard deviation of real ones."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        require(0.0 < momentum <= 1.0, "momentum", "above 0 and up to 1", momentum)
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

    def scaled(self, normal: Tensor, real: Tensor) -> Tensor:
        """Return embeddings with the moving averages."""
        assert self._next is not None  # _record was called before
        mean, deviation = self._next
        return mean + deviation * normal

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
        moving = [each.to(self._local.device) for each in state.get("moving", ())]
        self._moving = (moving[0], moving[1]) if moving else None


FEATURE_SYNTHESIZERS: dict[str, Callable[..., FeatureSynthesizer]] = {
    "sampling": Sampling,
    "gaussian": Gaussian,
    "random": Random,
}


class FeatureImputer:
    """Maps aligned rows to the rows of one party and imputes missing features."""

    def __init__(self, features: str, secret: int | None) -> None:
        self.row_index: RowIndex | None = None
        kind = "kind of synthetic features"
        self.synthesizer = build_from_spec(kind, features, FEATURE_SYNTHESIZERS)
        self._given = secret
        self.secret = 0  # drawn by fit
        self.local = torch.empty(0, dtype=torch.int64)
        self._pool = self.local

    def align_rows(self, row_index: RowIndex, own_rows: int, name: str) -> None:
        """Use aligned rows from now on."""
        last = int(row_index.local.max()) if row_index.rows else -1
        if last >= own_rows:
            problem = f"its alignment has row {last}, but it has only {own_rows} rows"
            raise PartyError(name, problem, "Align the ids that it holds now")
        self.row_index, self.secret = row_index, 0

    def split(self, codes: NDArray[np.int8] | None) -> NDArray[np.int8] | None:
        """Return a split of the own rows as one of the aligned rows."""
        # Missing rows are for training: parties with splits of their own agree only if
        # all of them hold all validation and test rows.
        if codes is None or self.row_index is None:
            return codes
        local = self.row_index.local.numpy()
        if not len(codes):
            return np.full(len(local), TRAIN, dtype=np.int8)
        return np.where(local >= 0, codes[local], TRAIN).astype(np.int8)

    def fit(self, training: Tensor, name: str, embeds: bool) -> None:
        """Draw a secret and fit the synthesizer to the training rows."""
        if self.row_index is None:
            return
        self.local = self.row_index.local.to(training.device)
        own = self.local[training]
        self._pool = own[own >= 0]
        if self._given is not None:
            self.secret = derive_seed(self._given, name)
        elif not self.secret:  # a run that continues keeps it, and its synthetic rows
            self.secret = draw_secret()
        if embeds:
            with at_party(name, "Align other ids, or hold out fewer rows"):
                self.synthesizer.fit(self.local, self._pool, self.secret)

    def state_dict(self) -> dict[str, Any]:
        """Return the secret and the synthesizer's state, empty without alignment."""
        if self.row_index is None:
            return {}
        features = self.synthesizer.state_dict()
        return {"union": {"secret": f"{self.secret:x}", "features": features}}

    def load_state_dict(self, state: dict[str, Any], embeds: bool) -> None:
        """Load a saved state."""
        if self.row_index is None or "union" not in state:
            return
        self.secret = int(state["union"]["secret"], 16)
        if embeds:
            self.synthesizer.fit(self.local, self._pool, self.secret)
            self.synthesizer.load_state_dict(state["union"]["features"])
