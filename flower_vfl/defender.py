"""Defenses at work: the same code at the strategy and at the label party."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any, Protocol, runtime_checkable

from flwr.supercore import log
from torch import Tensor

from flower_vfl.leakage.monitor import LIMIT, Leakage, LeakageMonitor
from flower_vfl.parties.base import check_finite
from flower_vfl.protocol.config import Shape, TrainingConfig

from .errors import ConfigError, PartyError
from .objectives import Task
from .randomness import draw_secret
from .transform import Batch, GradientTransform, Seen, apply_in_order, sees_embeddings


@runtime_checkable
class Strengthened(Protocol):
    """A transform whose protection can be raised while it works."""

    def strengthen(self, factor: float) -> str:
        """Raise the protection; return what it is now, or nothing if it stays."""
        ...


def unique(transforms: Iterable[GradientTransform]) -> list[GradientTransform]:
    """Return every transform once, also one that is used in several places."""
    return list({id(transform): transform for transform in transforms}.values())


def _adjustable(transform: GradientTransform) -> bool:
    """Say whether a transform, or any that it is made of, has a strength."""
    parts = getattr(transform, "parts", None)
    if isinstance(parts, Mapping):
        return any(_adjustable(part) for part in parts.values())
    return isinstance(transform, Strengthened)


@dataclass
class Defended:
    """What leaves for the passive parties, and what the defenses say about it."""

    gradients: dict[str, Tensor]
    metrics: dict[str, float]


@dataclass
class LabelStep:
    """What one training step of the label party brings."""

    gradients: dict[str, Tensor]
    loss: float
    rows: int
    metrics: dict[str, float]
    labels: Tensor


class Defender:
    """Applies gradient transforms in order to the gradient of every party.

    And measures what is left to find in what leaves, where that is asked for.
    """

    def __init__(
        self,
        transforms: Sequence[GradientTransform] = (),
        seed: int | None = None,
        watch: LeakageMonitor | None = None,
    ) -> None:
        self.transforms = list(transforms)
        self.watch = watch
        self.late = False  # whether a step need not wait for its measurement
        raising = watch is not None and watch.settings.action == "raise"
        if raising and not any(_adjustable(t) for t in self.transforms):
            raise ConfigError(
                "a leak limit with the action 'raise' needs a defense that has a "
                "strength: iso, noisy-gradients or marvell"
            )
        if not self.transforms:
            self.seed = 0  # nothing draws from it
        else:
            self.seed = draw_secret() if seed is None else seed

    @property
    def requires_labels(self) -> bool:
        """Whether any of them, or the measurement, needs labels."""
        watched = self.watch is not None
        return watched or any(t.requires_labels for t in self.transforms)

    @property
    def sees_embeddings(self) -> bool:
        """Whether any of them looks at embeddings."""
        return any(sees_embeddings(transform) for transform in self.transforms)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.transforms and self.watch is None

    def defend(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor | None,
        step: int,
        epoch: int,
        real: Tensor | None = None,
        seen: Seen | None = None,
    ) -> Defended:
        """Return what each passive party gets."""
        if self.idle:
            return Defended(dict(gradients), {})
        defended: dict[str, Tensor] = {}
        metrics: dict[str, float] = {}
        if not self.transforms:
            defended.update(gradients)
        for party, gradient in gradients.items() if self.transforms else ():
            batch = Batch(party, step, self.seed, labels, epoch)
            if seen is not None and self.sees_embeddings:
                sent = seen.embeddings[party].detach()
                batch = replace(batch, embedding=sent, rows=seen.rows)
            # Parties in one process may share the gradient's memory.
            result = apply_in_order(self._checked(), gradient.clone(), batch)
            if result is not None:
                defended[party] = result
            metrics.update({f"{k}/{party}": v for k, v in batch.metrics.items()})
        if self.watch is not None and labels is not None:
            given = defended, gradients, labels, step, real
            if self.late:
                metrics |= self.watch.measure_late(*given)
            else:
                metrics |= self.watch.outstanding() | self.watch.measure(*given)
            self._consider_raising(metrics)
        return Defended(defended, metrics)

    def _consider_raising(self, metrics: Mapping[str, float]) -> None:
        assert self.watch is not None  # the caller looked
        settings = self.watch.settings
        if settings.action == "raise" and any(k.startswith(LIMIT) for k in metrics):
            for transform in unique(self.transforms):
                if isinstance(transform, Strengthened):
                    told = transform.strengthen(settings.factor)
                    log(WARNING, "from the next step on: %s", told or "no change")

    def _checked(self) -> list[GradientTransform]:
        return [_Checked(transform) for transform in self.transforms]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every transform, and the secret of the noise."""
        states = [transform.state_dict() for transform in self.transforms]
        watch = {} if self.watch is None else self.watch.state_dict()
        return {"transforms": states, "seed": f"{self.seed:x}", "watch": watch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved states."""
        states = state["transforms"]
        if len(states) != len(self.transforms):
            raise ConfigError(
                f"the checkpoint is of a run with {len(states)} transforms and not "
                f"{len(self.transforms)}; use the same transforms"
            )
        for transform, saved in zip(self.transforms, states, strict=True):
            transform.load_state_dict(saved)
        self.seed = int(state["seed"], 16)
        if self.watch is not None:
            self.watch.load_state_dict(state["watch"])


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
    """What stands between the label party's gradients and everyone else."""

    def __init__(
        self, own: GradientTransform | None, factory: DefenseFactory | None
    ) -> None:
        self._own = [] if own is None else [own]
        self._factory = factory
        self.defender = Defender(self._own)

    def configure(
        self, terms: TrainingConfig, name: str, task: Task, trust_server: bool
    ) -> None:
        """Take over what the strategy says about defenses, or refuse it."""
        if terms.defended == "strategy" and not (trust_server or self._own):
            raise untrusted(name, "the raw gradients", None)
        transforms = list(self._own)
        if terms.defended == "label":
            transforms.append(self._named(terms.defense, name))
        dictated = trust_server and terms.noise_seed
        seed = int(terms.noise_seed, 16) if dictated else None
        watch = None
        leakage = Leakage.from_text(terms.leakage) if terms.leakage else None
        if leakage is not None and leakage.shows_labels and not trust_server:
            raise PartyError(
                name,
                "measuring every layer, or embeddings with labels, shows the labels to "
                "the server and the passive parties, and this node does not trust the "
                "server",
                "Measure without layers, and membership without labels; both are for "
                "simulations",
            )
        if leakage and leakage.membership and terms.defended == "strategy":
            raise PartyError(
                name,
                "is asked how well its synthetic labels hide, and a defense at the "
                "strategy changes its gradients after they left",
                'Have this node apply the defense: placement="label" at the strategy '
                '(defense-at="label" in the run config)',
            )
        if leakage is not None and terms.defended != "strategy":
            watch = LeakageMonitor(leakage, task)
        self.defender = Defender(transforms, seed, watch)

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
    """Return the error of a label party that is asked for too much."""
    return PartyError(
        name,
        f"a defense at the strategy asks for {what}, and this node does not trust the "
        "server with them",
        "Set trust-server=true in this node's config, or have this node apply the "
        'defense itself: placement="label" at the strategy (defense-at="label" in the '
        "run config)",
        step,
    )
