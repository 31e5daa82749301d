"""Defenses at work: the same code at the strategy and at the label party."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .errors import ConfigError, PartyError
from .party import Shape, Terms, check_finite
from .randomness import draw_secret
from .transform import Batch, GradientTransform, apply_in_order


@dataclass
class Defended:
    """What leaves for the passive parties, and what the defenses say about it.

    Parameters
    ----------
    gradients : dict[str, Tensor]
        By party; a party whose gradient was withheld is missing.
    metrics : dict[str, float]
        Named ``metric/party``.
    """

    gradients: dict[str, Tensor]
    metrics: dict[str, float]


class Defender:
    """Applies gradient transforms in order to the gradient of every party.

    Parameters
    ----------
    transforms : Sequence[GradientTransform]
        In the order in which they are applied.
    seed : int | None (default: None)
        What the noise is drawn from. None draws a secret; a known seed makes runs
        repeatable, and lets everyone who knows it subtract the noise.
    """

    def __init__(
        self, transforms: Sequence[GradientTransform] = (), seed: int | None = None
    ) -> None:
        self.transforms = list(transforms)
        if not self.transforms:
            self.seed = 0  # nothing draws from it
        else:
            self.seed = draw_secret() if seed is None else seed

    @property
    def requires_labels(self) -> bool:
        """Whether any of them needs labels."""
        return any(transform.requires_labels for transform in self.transforms)

    def defend(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor | None,
        step: int,
        epoch: int,
    ) -> Defended:
        """Return what each passive party gets.

        Parameters
        ----------
        gradients : Mapping[str, Tensor]
            By party.
        labels : Tensor | None
            Labels of the batch, for transforms that require them.
        step : int
            The training step, from 1.
        epoch : int
            The epoch, from 1.
        """
        if not self.transforms:
            return Defended(dict(gradients), {})
        defended, metrics = {}, {}
        for party, gradient in gradients.items():
            batch = Batch(party, step, self.seed, labels, epoch)
            # Parties in one process may share the gradient's memory.
            result = apply_in_order(self._checked(), gradient.clone(), batch)
            if result is not None:
                defended[party] = result
            metrics.update({f"{k}/{party}": v for k, v in batch.metrics.items()})
        return Defended(defended, metrics)

    def _checked(self) -> list[GradientTransform]:
        return [_Checked(transform) for transform in self.transforms]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every transform, and the secret of the noise."""
        states = [transform.state_dict() for transform in self.transforms]
        return {"transforms": states, "seed": f"{self.seed:x}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved states.

        Parameters
        ----------
        state : dict[str, Any]
            As :meth:`state_dict` returned it.
        """
        states = state["transforms"]
        if len(states) != len(self.transforms):
            raise ConfigError(
                f"the checkpoint is of a run with {len(states)} transforms and not "
                f"{len(self.transforms)}; use the same transforms"
            )
        for transform, saved in zip(self.transforms, states, strict=True):
            transform.load_state_dict(saved)
        self.seed = int(state["seed"], 16)


class _Checked:
    """A transform whose result is looked at before any party trains on it."""

    def __init__(self, transform: GradientTransform) -> None:
        self.transform = transform
        self.requires_labels = transform.requires_labels
        self.state_dict = transform.state_dict
        self.load_state_dict = transform.load_state_dict

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        result = self.transform(gradient, batch)
        if result is not None:
            _check_transformed(result, gradient.shape, self.transform, batch)
        return result


def _check_transformed(
    gradient: Tensor, shape: Shape, transform: GradientTransform, batch: Batch
) -> None:
    what = f"what {type(transform).__name__} made of its gradient"
    remedy = "Correct the transform or its settings"
    if gradient.shape != shape:
        problem = f"{what} has the shape {tuple(gradient.shape)} and not {tuple(shape)}"
        raise PartyError(batch.party, problem, remedy, batch.step)
    check_finite(gradient, batch.party, what, remedy, batch.step)


DefenseFactory = Callable[[str], GradientTransform]


class LabelGuard:
    """What stands between the label party's gradients and everyone else.

    Parameters
    ----------
    own : GradientTransform | None
        Applied first, whatever the strategy says.
    factory : DefenseFactory | None
        Builds a defense that the strategy names, from its text.
    """

    def __init__(
        self, own: GradientTransform | None, factory: DefenseFactory | None
    ) -> None:
        self._own = [] if own is None else [own]
        self._factory = factory
        self.defender = Defender(self._own)

    def agree(self, terms: Terms, name: str, trust_server: bool) -> None:
        """Take over what the strategy says about defenses, or refuse it.

        Parameters
        ----------
        terms : Terms
            What the strategy says.
        name : str
            The label party's name, for errors.
        trust_server : bool
            Whether the server may see raw gradients and decide on the noise.
        """
        if terms.defended == "strategy" and not (trust_server or self._own):
            raise untrusted(name, "the raw gradients", None)
        transforms = list(self._own)
        if terms.defended == "label":
            transforms.append(self._named(terms.defense, name))
        dictated = trust_server and terms.noise_seed
        seed = int(terms.noise_seed, 16) if dictated else None
        self.defender = Defender(transforms, seed)

    def _named(self, defense: str, name: str) -> GradientTransform:
        if self._factory is None:
            raise PartyError(
                name,
                f"is told to apply the defense '{defense}' and cannot build one",
                "Give LabelParty(defenses=flower_vfl.strategies.build_defense)",
            )
        try:
            return self._factory(defense)
        except ConfigError as error:
            remedy = "Correct the defense in the strategy's settings"
            raise PartyError(name, str(error), remedy) from error


def untrusted(name: str, what: str, step: int | None) -> PartyError:
    """Return the error of a label party that is asked for too much.

    Parameters
    ----------
    name : str
        The label party's name.
    what : str
        What it is asked for.
    step : int | None
        The training step.
    """
    return PartyError(
        name,
        f"a defense at the strategy asks for {what}, and this node does not trust the "
        "server with them",
        "Set trust-server=true in this node's config, or have this node apply the "
        'defense itself: placement="label" at the strategy (defense-at="label" in the '
        "run config)",
        step,
    )
