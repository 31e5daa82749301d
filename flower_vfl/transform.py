"""The interface of a gradient transform: what every defense implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .randomness import generator


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
        The run's seed.
    labels : Tensor | None (default: None)
        Labels of the rows, for a transform that requires them.
    epoch : int (default: 1)
        The epoch, from 1.
    """

    party: str
    step: int
    seed: int
    labels: Tensor | None = None
    epoch: int = 1

    def generator(self) -> torch.Generator:
        """Return a generator that depends on seed, party and step only."""
        return generator(self.seed, "transform", self.party, self.step)


@runtime_checkable
class GradientTransform(Protocol):
    """A defense: takes the gradient for one party and returns what that party gets.

    A transform returns a new tensor of the same shape and dtype and never changes the
    one it was given.
    """

    @property
    def requires_labels(self) -> bool:
        """Whether ``batch.labels`` must be given."""
        ...

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
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
        """Take over a saved state.

        Parameters
        ----------
        state : dict[str, Any]
            As :meth:`state_dict` returned it.
        """
        ...
