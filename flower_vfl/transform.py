"""Gradient transforms: the interface of a defense, and how defenses are applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, Protocol, Self, runtime_checkable

from flwr.supercore import log
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.monitor import LIMIT, Leakage, LeakageMonitor
from flower_vfl.protocol.codecs import Encoder
from flower_vfl.randomness import Noise, draw_secret, tensor_digest
from flower_vfl.records import Measurement
from flower_vfl.rows import check_finite

AUC_BOUND = "auc_bound"  # the metric that no attack's AUC can exceed


@dataclass(frozen=True)
class Batch:
    """What a transform may know about the gradient that it changes.

    Parameters
    ----------
    party : str
        The passive party that is to receive the gradient.
    step : int
        The training step, from 1.
    seed : int
        Key of the noise: a secret, since whoever knows it can subtract the noise.
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
        where it is not known, as in an app that is not vertical.
    rows : Tensor | None (default: None)
        Numbers of the rows, the same in every epoch; given with the embedding.
    digest : bytes (default: b"")
        Of the gradient before all transforms: a step that is repeated with another
        gradient has other noise, so the difference of the two tells nothing.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl import Batch
    >>> batch = Batch(party="passive-1", step=1, seed=2)
    >>> noise = batch.noise().normal((3,))
    >>> bool((noise == batch.noise().normal((3,))).all())
    True
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
    digest: bytes = field(default=b"", compare=False)

    def with_digest(self, gradient: Tensor) -> Self:
        """Return the batch of a gradient that no transform has changed yet."""
        found = tensor_digest(gradient, self.seed, self.party, self.step)
        return replace(self, digest=found)

    def noise(self) -> Noise:
        """Return random numbers, the same ones only for the same gradient again."""
        return Noise(self.seed, self.stage, self.party, self.step, self.digest)


@runtime_checkable
class GradientTransform(Protocol):
    """A defense: takes the gradient for one party and returns what that party gets.

    A transform returns a tensor of the same shape and dtype and never changes the one
    it was given. None withholds the gradient: the party does not train on this batch.

    Examples
    --------
    >>> from flower_vfl import Batch, GradientTransform
    >>> class SignOnly:
    ...     requires_labels = False
    ...     def __call__(self, gradient, batch):
    ...         return gradient.sign()
    ...     def state_dict(self):
    ...         return {}
    ...     def load_state_dict(self, state):
    ...         pass
    >>> isinstance(SignOnly(), GradientTransform)
    True
    """

    @property
    def requires_labels(self) -> bool:
        """Whether ``batch.labels`` must be given."""

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return what leaves for the party of a gradient with one row per example."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


@runtime_checkable
class Strengthened(Protocol):
    """A transform whose protection can be raised while it works."""

    def strengthen(self, factor: float) -> str:
        """Raise the protection; return what it is now, or nothing if it stays."""


@dataclass(frozen=True)
class Seen:
    """The embeddings of a batch by party, and the numbers of its rows."""

    embeddings: Mapping[str, Tensor]
    rows: Tensor


def sees_embeddings(transform: GradientTransform) -> bool:
    """Return whether a transform has a true attribute ``sees_embeddings``."""
    return bool(getattr(transform, "sees_embeddings", False))


def apply_in_order(
    transforms: Sequence[GradientTransform], gradient: Tensor, batch: Batch
) -> Tensor | None:
    """Apply transforms one after the other, and check what each of them returns."""
    several = len(transforms) > 1  # the same noise twice would be no noise
    if transforms and not batch.digest:
        batch = batch.with_digest(gradient)
    for number, transform in enumerate(transforms):
        if transform.requires_labels:
            batch.metrics.pop(AUC_BOUND, None)
        stage = f"{batch.stage}/{number}"
        changed = transform(gradient, replace(batch, stage=stage) if several else batch)
        if changed is None:
            return None
        what = f"what {type(transform).__name__} made of its gradient"
        remedy = "Correct the transform or its settings"
        if changed.shape != gradient.shape or changed.dtype != gradient.dtype:
            kinds = [f"{g.dtype} {tuple(g.shape)}" for g in (changed, gradient)]
            problem = f"{what} is {kinds[0]} and not {kinds[1]}"
            raise PartyError(batch.party, problem, remedy, batch.step)
        check_finite(changed, batch.party, what, remedy, batch.step)
        gradient = changed
    return gradient


class Defender:
    """Transforms and encodes every party's gradient, and measures what it decodes."""

    def __init__(
        self,
        transforms: Sequence[GradientTransform] = (),
        seed: int | None = None,
        monitor: LeakageMonitor | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.transforms = list(transforms)
        self.monitor = monitor
        self.encoder = encoder
        raising = monitor is not None and monitor.settings.action == "raise"
        if raising and not any(_adjustable(t) for t in self.transforms):
            needed = "a defense that has a strength: iso, noisy-gradients or marvell"
            raise ConfigError(f"a leak limit with the action 'raise' needs {needed}")
        self.seed = 0  # nothing draws from it
        if self.transforms:
            self.seed = draw_secret() if seed is None else seed
        self.idle = not self.transforms and monitor is None and encoder is None
        self.sees_embeddings = any(map(sees_embeddings, self.transforms))
        by_monitor = monitor is not None and monitor.needs_rows
        by_encoder = encoder is not None and encoder.codec.feedback
        self.needs_rows = self.sees_embeddings or by_monitor or by_encoder  # see Seen

    @property
    def requires_labels(self) -> bool:
        """Whether any transform, or the measurement, needs labels."""
        watched = self.monitor is not None
        return watched or any(t.requires_labels for t in self.transforms)

    def defend(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor | None,
        step: int,
        epoch: int,
        *,
        real: Tensor | None = None,
        seen: Seen | None = None,
        last: bool = False,
        late: bool = False,
        true_labels: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], list[Measurement]]:
        """Return what leaves for each party, and what was measured with true labels."""
        defended: dict[str, Tensor] = {}  # as the party trains on it
        leaving: dict[str, Tensor] = {}
        measured: list[Measurement] = []
        for party, gradient in gradients.items():
            batch = Batch(party, step, self.seed, labels, epoch)
            if seen is not None and self.sees_embeddings:
                sent = seen.embeddings[party].detach()
                batch = replace(batch, embedding=sent, rows=seen.rows)
            # Parties in one process may share the gradient's memory.
            copy = gradient.clone() if self.transforms else gradient
            result = apply_in_order(self.transforms, copy, batch)
            if result is not None:
                defended[party] = leaving[party] = result
                if self.encoder is not None:
                    at = party, step, None if seen is None else seen.rows
                    leaving[party] = encoded = self.encoder.encode(result, *at)
                    if self.encoder.codec.feedback:  # a bound of one step says nothing
                        batch.metrics.pop(AUC_BOUND, None)  # about a sum of several
                    read = result.shape[1:], party, "its gradient", step
                    defended[party] = self.encoder.codec.read(encoded, *read)
            for name, value in batch.metrics.items():
                measured.append(Measurement(name, value, step, party))
        if self.monitor is not None and labels is not None:
            truth = labels if true_labels is None else true_labels
            rows = None if seen is None else seen.rows
            inputs = None if seen is None else seen.embeddings
            given = defended, gradients, truth, step, real, rows, last, inputs, late
            measured += self.monitor.measure(*given)
            self._consider_raising(self.monitor.settings, measured)
        return leaving, measured

    def _consider_raising(
        self, settings: Leakage, measured: Sequence[Measurement]
    ) -> None:
        if settings.action == "raise" and any(m.metric == LIMIT for m in measured):
            for transform in {id(each): each for each in self.transforms}.values():
                if isinstance(transform, Strengthened):
                    told = transform.strengthen(settings.factor)
                    log(WARNING, "from the next step on: %s", told or "no change")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every transform, and the secret of the noise."""
        states = [transform.state_dict() for transform in self.transforms]
        monitor = {} if self.monitor is None else self.monitor.state_dict()
        found = {"transforms": states, "seed": f"{self.seed:x}", "monitor": monitor}
        if self.encoder is not None:
            found["encoder"] = self.encoder.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        states = state["transforms"]
        if len(states) != len(self.transforms):
            ours = f"not {len(self.transforms)}; use the same transforms"
            raise ConfigError(f"the checkpoint has {len(states)} transforms, {ours}")
        for transform, saved in zip(self.transforms, states, strict=True):
            transform.load_state_dict(saved)
        self.seed = int(state["seed"], 16)
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])
        if self.encoder is not None:
            self.encoder.load_state_dict(state.get("encoder", {}))


def _adjustable(transform: GradientTransform) -> bool:
    """Say whether a transform, or any that it is made of, has a strength."""
    parts = getattr(transform, "parts", None)
    if isinstance(parts, Mapping):
        return any(_adjustable(part) for part in parts.values())
    return isinstance(transform, Strengthened)
