"""Local updates from cached embeddings and gradients, between two exchanges.

Fu et al., Towards Communication-efficient Vertical Federated Learning Training via
Cache-enabled Local Updates (CELU-VFL), 2022. https://arxiv.org/abs/2207.14628. With a
cache of one batch, a party uses the newest one again, as in FedBCD.

After each exchanged batch, every party makes further updates from the last batches that
it exchanged, the one used longest ago first. A row counts with the cosine of what it
gives now and what it gave when it was exchanged: its embedding at a passive party, the
gradient of its embeddings at the label party.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, require
from flower_vfl.objectives import Objective, TopModelObjective, clear_gradients

if TYPE_CHECKING:
    from flower_vfl.protocol.config import TrainingConfig

    from .base import Party


@dataclass(frozen=True)
class LocalUpdates:
    """How often, and from what, parties train between two exchanges.

    Parameters
    ----------
    steps : int (default: 1)
        Updates of every party for each exchanged batch, that of the exchange included.
    cache : int (default: 5)
        Number of exchanged batches that a party keeps for them.
    threshold : float (default: 0.5)
        Least cosine, that of 60 degrees, between what a row gives now and what it gave
        when it was exchanged. Rows below it have no influence.

    Examples
    --------
    >>> from flower_vfl.strategies import LocalUpdates, VerticalStrategy
    >>> strategy = VerticalStrategy(local_steps=LocalUpdates(3, cache=2))
    """

    steps: int = 1
    cache: int = 5
    threshold: float = 0.5

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant."""
        require(self.steps >= 1, "local_steps", "at least 1", self.steps)
        require(self.cache >= 1, "cache", "at least 1", self.cache)
        limits = -1.0 <= self.threshold < 1.0
        require(limits, "threshold", "from -1 to below 1", self.threshold)


@dataclass
class CachedBatch:
    """A batch as it was exchanged; a passive party has its own part and no labels."""

    step: int
    rows: Tensor
    embeddings: list[Tensor]
    gradients: list[Tensor]
    labels: Tensor | None = None


class BatchCache:
    """The batches that were exchanged last, the one used longest ago first."""

    def __init__(self, settings: LocalUpdates) -> None:
        self.settings = settings
        self._batches: list[CachedBatch] = []

    def exchanged(self, batch: CachedBatch) -> Iterator[CachedBatch]:
        """Keep a batch, and yield those to update from, one for each local update."""
        if len(self._batches) == self.settings.cache:
            self._batches.remove(min(self._batches, key=lambda each: each.step))
        self._batches.append(batch)
        for _ in range(self.settings.steps - 1):
            self._batches.append(self._batches.pop(0))
            yield self._batches[-1]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the batches in their order."""
        each_batch = map(vars, self._batches)
        return [{k: _copied(v) for k, v in batch.items()} for batch in each_batch]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._batches = [CachedBatch(**each) for each in state]


def _copied(value: Any) -> Any:
    """Return no views, which are saved with all that they are views of."""
    if isinstance(value, list):
        return [each.clone() for each in value]
    return value.clone() if isinstance(value, Tensor) else value


def build_cache(config: TrainingConfig) -> BatchCache | None:
    """Return the cache of a run with local updates, None without them."""
    if config.local_steps == 1:
        return None
    given = config.local_steps, config.local_cache, config.local_threshold
    return BatchCache(LocalUpdates(*given))


def check_objective(objective: Objective, config: TrainingConfig) -> None:
    """Refuse an objective that is not a mean over rows, if there are local updates."""
    plain = type(objective).step is TopModelObjective.step and not objective.by_row
    if config.local_steps > 1 and not plain:
        problem = f"{type(objective).__name__} cannot weight rows for local updates"
        remedy = "use cross-entropy or mean-squared-error, or local_steps=1"
        raise ConfigError(f"{problem}; {remedy}")


def row_weights(
    now: Sequence[Tensor], cached: Sequence[Tensor], threshold: float
) -> Tensor:
    """Return the cosine of each row now and as it was, 0 below the threshold."""
    joined = [torch.cat([p.flatten(1) for p in parts], 1) for parts in (now, cached)]
    cosines = F.cosine_similarity(joined[0].detach(), joined[1].to(joined[0]), dim=1)
    return cosines.where(cosines >= threshold, torch.zeros_like(cosines))


def _weighted(tensor: Tensor, weights: Tensor) -> Tensor:
    return tensor * weights.reshape(-1, *[1] * (tensor.dim() - 1))


def update_passive(party: Party, cache: BatchCache, batch: CachedBatch) -> None:
    """Train a bottom model on cached gradients, after a batch was exchanged."""
    for each in cache.exchanged(batch):
        with party.random:
            output = party.embed_rows(each.rows, ("step", each.step), True)
        if output.requires_grad:
            given = each.embeddings, cache.settings.threshold
            weights = row_weights([output], *given)
            party.descend(output, _weighted(each.gradients[0], weights).to(output))


def update_label(
    party: Party,
    joiner: nn.Module,
    objective: Objective,
    cache: BatchCache,
    batch: CachedBatch,
) -> None:
    """Train the label party's modules on cached embeddings, after an exchange."""
    assert isinstance(objective, TopModelObjective)
    for each in cache.exchanged(batch):
        assert each.labels is not None
        leaves = [part.detach().requires_grad_() for part in each.embeddings]
        with party.random:
            own = []
            if party.model is not None:
                own = [party.embed_rows(each.rows, ("step", each.step), True)]
            # A clone, because the first layer of a top model may work in place.
            output = objective.top(joiner([*own, *leaves]).clone())
            loss = objective.loss(output, each.labels)
        of_output, *of_leaves = torch.autograd.grad(
            loss, [output, *leaves], retain_graph=True, materialize_grads=True
        )
        weights = row_weights(of_leaves, each.gradients, cache.settings.threshold)
        for optimizer in party.optimizers():
            clear_gradients(optimizer)
        # The loss is a mean over rows: this is the gradient of the weighted loss.
        output.backward(_weighted(of_output, weights))
        for optimizer in party.optimizers():
            optimizer.step()
