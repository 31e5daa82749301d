"""The interface of a gradient transform: what every defense implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .randomness import noise_generator

AUC_BOUND = "auc_bound"  # the metric that no attack's AUC can exceed


@dataclass(frozen=True)
class Seen:
    """What arrived before the gradients were made."""

    embeddings: Mapping[str, Tensor]
    rows: Tensor


@dataclass(frozen=True)
class Batch:
    """What a transform may know about the gradient in its hands.

    Parameters
    ----------
    party : str
        The passive party that is to receive the gradient.
    step : int
        The training step, from 1.
    seed : int
        What the noise is drawn from: a secret, since whoever knows it can subtract the
        noise again.
    labels : Tensor | None (default: None)
        Labels of the rows, for a transform that requires them.
    epoch : int (default: 1)
        The epoch, from 1.
    metrics : dict[str, float] (default: {})
        Where a transform reports what it did, e.g. ``batch.metrics["withheld"] = 1.0``.
        Becomes a training metric of the party.
    stage : str (default: "")
        Which of several transforms this is for; each has noise of its own.
    embedding : Tensor | None (default: None)
        What the party sent for the rows, for a transform with ``sees_embeddings``; None
        where it is not known, as in a deployment that is not vertical.
    rows : Tensor | None (default: None)
        Numbers of the rows, which stay the same in every epoch; with the embedding.
    """

    party: str
    step: int
    seed: int
    labels: Tensor | None = None
    epoch: int = 1
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    stage: str = field(default="", compare=False)
    embedding: Tensor | None = field(default=None, compare=False)
    rows: Tensor | None = field(default=None, compare=False)

    def generator(self) -> torch.Generator:
        """Return a generator that depends on seed, party, step and stage only."""
        return noise_generator(self.seed, self.stage, self.party, self.step)


@runtime_checkable
class GradientTransform(Protocol):
    """A defense: takes the gradient for one party and returns what that party gets.

    A transform returns a tensor of the same shape and dtype and never changes the one
    it was given. None withholds the gradient: the party does not train on this batch.
    """

    @property
    def requires_labels(self) -> bool:
        """Whether ``batch.labels`` must be given."""
        ...

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return the gradient that leaves for the party.

        Parameters
        ----------
        gradient : Tensor
            One row per example.
        batch : Batch
            Party, step and, if required, labels.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        ...


def sees_embeddings(transform: GradientTransform) -> bool:
    """Say whether a transform wants to know the embeddings: it has that attribute."""
    return bool(getattr(transform, "sees_embeddings", False))


def apply_in_order(
    transforms: Sequence[GradientTransform], gradient: Tensor, batch: Batch
) -> Tensor | None:
    """Return what several transforms, one after the other, make of a gradient.

    A bound on the AUC of every attack outlives a transform that sees no labels, because
    what such a transform adds is no news about them; one that sees labels ends it.
    """
    defended: Tensor | None = gradient
    for number, transform in enumerate(transforms):
        if transform.requires_labels:
            batch.metrics.pop(AUC_BOUND, None)
        if defended is not None:
            several = len(transforms) > 1  # the same noise twice would be no noise
            stage = f"{batch.stage}/{number}" if several else batch.stage
            defended = transform(defended, replace(batch, stage=stage))
    return defended
