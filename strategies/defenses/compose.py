"""No defense, and combinations of transforms: in order, by party, and by epoch."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.rows import RowTransform
from flower_vfl.transform import (
    Batch,
    GradientTransform,
    Strengthened,
    apply_in_order,
    sees_embeddings,
)


class NoDefense(RowTransform):
    """Leave every gradient as it is.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import NoDefense
    >>> NoDefense()(torch.ones(1, 2), Batch("passive-1", step=1, seed=7))
    tensor([[1., 1.]])
    """

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows themselves."""
        return rows


class _Combination:
    """A transform that delegates its work and its state to named transforms."""

    parts: dict[str, GradientTransform]

    @property
    def requires_labels(self) -> bool:
        """Whether any of them needs labels."""
        return any(part.requires_labels for part in self.parts.values())

    @property
    def sees_embeddings(self) -> bool:
        """Whether any of them needs the embeddings."""
        return any(sees_embeddings(part) for part in self.parts.values())

    @property
    def run_auc(self) -> float | None:
        """The AUC that is a bound for a whole run, None without one."""
        return None

    def strengthen(self, factor: float) -> str:
        """Raise the strength of every adjustable part; return messages for the log."""
        parts = {id(part): part for part in self.parts.values()}.values()
        adjustable = [part for part in parts if isinstance(part, Strengthened)]
        return ", ".join(filter(None, (p.strengthen(factor) for p in adjustable)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every part by its name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if set(state) != set(self.parts):
            saved, ours = sorted(state), sorted(self.parts)
            raise ConfigError(f"the saved state is of the defenses {saved}, not {ours}")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Compose(_Combination):
    """Apply several transforms in order.

    A bound that one reports is dropped if a later one uses labels.

    Parameters
    ----------
    transforms : Sequence[GradientTransform]
        In the order in which they are applied.

    Examples
    --------
    >>> from flower_vfl.strategies import Compose, GradientCompression, Marvell
    >>> transform = Compose([Marvell(s=4.0), GradientCompression(keep=0.5)])
    >>> transform.requires_labels
    True
    """

    def __init__(self, transforms: Sequence[GradientTransform]) -> None:
        self.parts = {str(i): t for i, t in enumerate(flat(transforms))}

    @property
    def run_auc(self) -> float | None:
        """The bound of the last one that uses labels."""
        using = [part for part in self.parts.values() if part.requires_labels]
        return getattr(using[-1], "run_auc", None) if using else None

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return the gradient after all transforms."""
        return apply_in_order(list(self.parts.values()), gradient, batch)


def flat(transforms: Sequence[GradientTransform]) -> list[GradientTransform]:
    """Return transforms with the parts of a :class:`Compose` in its place."""
    parts: list[GradientTransform] = []
    for each in transforms:
        parts += each.parts.values() if isinstance(each, Compose) else [each]
    return parts


class PerParty(_Combination):
    """Apply another transform for some parties.

    Parameters
    ----------
    parties : Mapping[str, GradientTransform]
        Transforms by party name.
    default : GradientTransform | None (default: None)
        The transform for all other parties; None is no defense.

    Examples
    --------
    >>> from flower_vfl.strategies import Iso, PerParty, defense_spec
    >>> defense_spec(PerParty({"bank": Iso(t=4.0)}, default=Iso()))
    'bank=iso:t=4.0; *=iso'
    """

    def __init__(
        self,
        parties: Mapping[str, GradientTransform],
        default: GradientTransform | None = None,
    ) -> None:
        if "*" in parties and default is not None:
            raise ConfigError("give the default or a party '*', not both")
        self.parts = {"*": NoDefense() if default is None else default, **parties}

    @property
    def run_auc(self) -> float | None:
        """The largest of the parties, if all have one."""
        found = [getattr(part, "run_auc", None) for part in self.parts.values()]
        return max((auc for auc in found if auc), default=None) if all(found) else None

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return the gradient after the party's transform."""
        return self.parts.get(batch.party, self.parts["*"])(gradient, batch)


class Scheduled(_Combination):
    """Change the transform during training.

    Parameters
    ----------
    epochs : Mapping[int, GradientTransform]
        Transforms by their first epoch, from 1; before the smallest is no defense.

    Examples
    --------
    >>> from flower_vfl.strategies import Iso, NoDefense, Scheduled, defense_spec
    >>> defense_spec(Scheduled({1: NoDefense(), 5: Iso(t=4.0)}))
    '@1 none @5 iso:t=4.0'
    """

    def __init__(self, epochs: Mapping[int, GradientTransform]) -> None:
        if any(epoch < 1 for epoch in epochs):
            raise ConfigError(f"epochs count from 1, got {sorted(epochs)}")
        if len({id(t) for t in epochs.values()}) != len(epochs):
            raise ConfigError("give every epoch of a schedule its own transform")
        self.epochs = dict(sorted(epochs.items()))
        self.parts = {str(epoch): t for epoch, t in self.epochs.items()}

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return the gradient after the transform of this epoch."""
        begun = [epoch for epoch in self.epochs if epoch <= batch.epoch]
        return self.epochs[begun[-1]](gradient, batch) if begun else gradient
