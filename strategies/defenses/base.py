"""What the gradient transforms share: rows, precision, noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.rows import to_rows
from flower_vfl.transform import Batch


class RowTransform(ABC):
    """A gradient transform whose formula works on a matrix with one row per example.

    Takes care of what has nothing to do with a formula: gradients of any shape are
    flattened to rows, half precision is computed in single precision, a batch without
    entries is returned as it is, and the result is kept within what its dtype can hold.
    """

    requires_labels = False

    @abstractmethod
    def perturb(self, rows: Tensor, batch: Batch) -> Tensor | None:
        """Return what the party gets, or None to withhold it.

        Parameters
        ----------
        rows : Tensor
            The gradient, B×d, float32 or float64; not to be changed.
        batch : Batch
            Party, step and, if required, labels.
        """

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return the gradient that leaves for the party."""
        if not gradient.is_floating_point():
            raise PartyError(
                batch.party,
                f"its gradient is of type {gradient.dtype}",
                "A defense works on floating point numbers",
                batch.step,
            )
        if gradient.numel() == 0:
            return gradient
        rows = to_rows(gradient)
        changed = self.perturb(rows, batch)
        if changed is None or changed is rows:
            return None if changed is None else gradient
        limits = torch.finfo(gradient.dtype)
        kept = changed.clamp(limits.min, limits.max)
        return kept.to(gradient.dtype).reshape(gradient.shape)

    def labels(self, batch: Batch, rows: int) -> Tensor:
        """Return the labels of a batch, flat, or say that they are missing."""
        name = type(self).__name__
        if batch.labels is None:
            raise PartyError(
                batch.party,
                f"{name} needs the labels of the batch and got none",
                "Hand them over where it runs, or run it at the label party",
                batch.step,
            )
        flat = batch.labels.detach().reshape(-1)
        if len(flat) != rows:
            raise PartyError(
                batch.party,
                f"{name} got {len(flat)} labels for {rows} rows of its gradient",
                "Give one label per row",
                batch.step,
            )
        return flat

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart: nothing, unless a defense says so."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        if state:
            raise ConfigError(
                f"{type(self).__name__} keeps no state, got {list(state)}"
            )


class AdjustableTransform(RowTransform):
    """A defense whose strength is one number, which can be raised while it works.

    What it was raised by is its state, so that a run that is resumed with another
    strength is raised from there.
    """

    raised = 1.0

    def strengthen(self, factor: float) -> str:
        """Raise the strength from now on; return what to tell about it."""
        self.raised *= factor
        return f"{type(self).__name__} {self.raised:g} times as strong as it was set"

    def state_dict(self) -> dict[str, Any]:
        """Return how much it was raised."""
        return {"raised": self.raised}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        if "raised" not in state:
            name = type(self).__name__
            raise ConfigError(f"{sorted(state)} is not the state of the defense {name}")
        self.raised = float(state["raised"])


def require(condition: bool, name: str, wanted: str, value: object) -> None:
    """Refuse a parameter of a defense."""
    if not condition:
        raise ConfigError(f"{name} must be {wanted}, got {value}")


def normal(rows: Tensor, generator: torch.Generator, columns: bool = True) -> Tensor:
    """Return standard normal noise for a matrix.

    Drawn on the generator's device, so that every device gets the same numbers.
    """
    shape = rows.shape if columns else (len(rows), 1)
    noise = torch.randn(
        shape, generator=generator, dtype=rows.dtype, device=generator.device
    )
    return noise.to(rows.device)
