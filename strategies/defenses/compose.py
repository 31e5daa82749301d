"""Defenses made of defenses: one after the other, by party, and by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flower_vfl.defender import Strengthened, unique
from flower_vfl.errors import ConfigError
from flower_vfl.transform import (
    Batch,
    GradientTransform,
    apply_in_order,
    sees_embeddings,
)

from .no_defense import NoDefense


class _Several:
    """A transform that hands the work, and its state, to named others."""

    parts: dict[str, GradientTransform]

    @property
    def requires_labels(self) -> bool:
        """Whether any of them needs labels."""
        return any(part.requires_labels for part in self.parts.values())

    @property
    def sees_embeddings(self) -> bool:
        """Whether any of them looks at embeddings."""
        return any(sees_embeddings(part) for part in self.parts.values())

    def strengthen(self, factor: float) -> str:
        """Raise the protection of every part that has a strength."""
        told = []
        for part in unique(self.parts.values()):
            if isinstance(part, Strengthened) and (text := part.strengthen(factor)):
                told.append(text)
        return ", ".join(told)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every part by its name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        if set(state) != set(self.parts):
            raise ConfigError(
                f"the saved state is of the defenses {sorted(state)}, these are "
                f"{sorted(self.parts)}"
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Compose(_Several):
    """Apply several transforms in order.

    A bound that one of them reports is reported for the whole as long as no later one
    sees labels.

    Parameters
    ----------
    transforms : Sequence[GradientTransform]
        In the order in which they are applied.
    """

    def __init__(self, transforms: Sequence[GradientTransform]) -> None:
        self.parts = {str(i): t for i, t in enumerate(flat(transforms))}

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return what all of them together make of a gradient."""
        return apply_in_order(list(self.parts.values()), gradient, batch)


def flat(transforms: Sequence[GradientTransform]) -> list[GradientTransform]:
    """Return transforms with those of a :class:`Compose` in its place."""
    parts: list[GradientTransform] = []
    for transform in transforms:
        if isinstance(transform, Compose):
            parts += transform.parts.values()
        else:
            parts.append(transform)
    return parts


class PerParty(_Several):
    """A transform of its own for some parties.

    Parameters
    ----------
    parties : Mapping[str, GradientTransform]
        By party name.
    default : GradientTransform | None (default: None)
        For all others; None is no defense.
    """

    def __init__(
        self,
        parties: Mapping[str, GradientTransform],
        default: GradientTransform | None = None,
    ) -> None:
        if "*" in parties and default is not None:
            raise ConfigError("give the default or a party '*', not both")
        self.parts = {"*": NoDefense() if default is None else default, **parties}

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return what the party's transform makes of its gradient."""
        return self.parts.get(batch.party, self.parts["*"])(gradient, batch)


class Scheduled(_Several):
    """A transform that changes in the course of the training.

    Parameters
    ----------
    epochs : Mapping[int, GradientTransform]
        By the epoch, from 1, with which it begins; none before the first.
    """

    def __init__(self, epochs: Mapping[int, GradientTransform]) -> None:
        if any(epoch < 1 for epoch in epochs):
            raise ConfigError(f"epochs count from 1, got {sorted(epochs)}")
        if len({id(t) for t in epochs.values()}) != len(epochs):
            raise ConfigError("give every epoch of a schedule its own transform")
        self.epochs = dict(sorted(epochs.items()))
        self.parts = {str(epoch): t for epoch, t in self.epochs.items()}

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return what the transform of this epoch makes of a gradient."""
        begun = [epoch for epoch in self.epochs if epoch <= batch.epoch]
        return self.epochs[begun[-1]](gradient, batch) if begun else gradient
