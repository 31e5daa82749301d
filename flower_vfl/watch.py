"""Leakage as a training metric: attacks on every gradient that leaves, and a limit."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from logging import WARNING
from typing import Any, Literal, get_args

from flwr.supercore import log
from torch import Tensor

from .attacks.membership import membership_aucs
from .attacks.meter import LeakageMeter
from .attacks.success import direct_success
from .errors import ConfigError, unknown_name
from .objectives import Task

LeakAction = Literal["warn", "stop", "raise"]
ACTIONS: tuple[LeakAction, ...] = get_args(LeakAction)
# Centers of the batch itself find a leak even in noise: such a limit would never hold.
FOR_A_LIMIT = ("norm", "cosine", "mean:held_out=true")
LEAK, FLIPPED, LIMIT = "leak", "leak_flipped", "leak_limit"
DIRECT_SUCCESS = "success_direct"
Membership = Literal["", "own", "joint"]
MEMBERSHIPS: tuple[Membership, ...] = get_args(Membership)
MEMBER = "member_"
MEMBER_GRADIENT, MEMBER_EMBEDDING = f"{MEMBER}spectral", f"{MEMBER}embedding"


@dataclass(frozen=True)
class Leakage:
    """What is measured about the gradients that leave, and what must not be exceeded.

    Parameters
    ----------
    attacks : tuple[str, ...] (default: ())
        Score attacks by name, perhaps with parameters: ``"norm"``,
        ``"mean:hard=true"``; none takes those that fit the task, and with a limit
        norm, cosine and ``"mean:held_out=true"``.
    limit : float | None (default: None)
        What no attack's leak AUC a may exceed for any party, as an average over
        `window` steps, nor 1 − a; for a regression, the average of |rho|.
    action : Literal["warn", "stop", "raise"] (default: "warn")
        What happens then: a warning in the log; the end of the run, with a checkpoint;
        or a defense that is stronger by `factor` from the next step on.
    window : int (default: 20)
        Measured steps to average over; a single batch says little.
    factor : float (default: 2.0)
        By how much a defense is made stronger.
    every : int (default: 1)
        Measure every so many steps only, where time matters.
    coalitions : tuple[str, ...] (default: ())
        Parties that pool what they see, ``"passive-1+passive-2"``; ``"all"`` for all.
    baseline : bool (default: False)
        Whether the same attacks also run on random gradients, for comparison.
    layers : bool (default: False)
        Whether every layer of the bottom models is measured too, which shows the
        passive parties the labels: for simulations.
    membership : Literal["", "own", "joint"] (default: "")
        Whether the spectral attack looks for rows that another party does not hold, on
        a union of ids. ``"own"`` measures each side where the truth is known: gradients
        at the label party, embeddings at the passive party. ``"joint"`` joins labels to
        the embeddings, as the label party can; this shows them to the passive parties:
        for simulations.
    """

    attacks: tuple[str, ...] = ()
    limit: float | None = None
    action: LeakAction = "warn"
    window: int = 20
    factor: float = 2.0
    every: int = 1
    coalitions: tuple[str, ...] = ()
    baseline: bool = False
    layers: bool = False
    membership: Membership = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.action not in ACTIONS:
            raise unknown_name("action", self.action, ACTIONS)
        if self.membership not in MEMBERSHIPS:
            raise unknown_name("membership", self.membership, MEMBERSHIPS)
        if self.limit is not None and not 0.0 < self.limit <= 1.0:
            raise ConfigError(f"a leak limit is between 0 and 1, got {self.limit}")
        if self.limit is None and self.action != "warn":
            raise ConfigError(f"the action '{self.action}' needs a leak limit")
        if self.window < 1 or self.every < 1 or not self.factor > 1.0:
            raise ConfigError(
                f"window and every are at least 1 and a factor more than 1, got "
                f"{self.window}, {self.every} and {self.factor}"
            )

    @property
    def shows_labels(self) -> bool:
        """Whether labels travel to the passive parties."""
        return self.layers or self.membership == "joint"

    @property
    def probes(self) -> bool:
        """Whether passive parties measure anything."""
        return self.layers or bool(self.membership)

    @property
    def membership_only(self) -> bool:
        """Whether nothing but membership is measured."""
        plain = not self.attacks and self.limit is None and not self.layers
        return bool(self.membership) and plain and not self.coalitions

    def members(self, coalition: str, parties: Iterable[str]) -> list[str]:
        """Return who is in a coalition.

        Parameters
        ----------
        coalition : str
            One of `coalitions`.
        parties : Iterable[str]
            All parties.
        """
        if coalition.strip() == "all":
            return list(parties)
        return [name.strip() for name in coalition.split("+")]

    def check_parties(self, parties: Collection[str]) -> None:
        """Refuse a coalition that cannot be one.

        Parameters
        ----------
        parties : Collection[str]
            The passive parties of the run.
        """
        for coalition in self.coalitions:
            members = self.members(coalition, parties)
            unknown = [name for name in members if name not in parties]
            if unknown:
                raise unknown_name("party of a coalition", unknown[0], parties)
            if len(set(members)) < max(len(members), 2):
                raise ConfigError(
                    f"the coalition '{coalition}' has the members "
                    f"{', '.join(members)}; it takes two different parties or more"
                )

    def to_text(self) -> str:
        """Return the settings as text, for a message."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Leakage:
        """Return the settings that a text holds.

        Parameters
        ----------
        text : str
            As :meth:`to_text` returned it.
        """
        values: dict[str, Any] = json.loads(text)
        for name in ("attacks", "coalitions"):
            values[name] = tuple(values[name])
        return cls(**values)


class LeakWatch:
    """Measures every batch of gradients that leaves.

    Parameters
    ----------
    settings : Leakage
        What is measured.
    task : {"binary", "multiclass", "regression"}
        What the labels are.
    """

    def __init__(self, settings: Leakage, task: Task) -> None:
        self.settings = settings
        attacks = settings.attacks or None
        if attacks is None and settings.limit is not None and task != "regression":
            attacks = FOR_A_LIMIT
        if settings.membership_only:
            attacks = ()
        wider = settings.layers or settings.coalitions
        names = [text.partition(":")[0] for text in attacks or ()]
        self._reads_labels = "direct" in names and task != "regression"
        if wider and "direct" in names and task != "regression":
            raise ConfigError(
                "the direct attack reads one party's summed logits; measure it without "
                "layers and coalitions"
            )
        self.meter = LeakageMeter(attacks, task, settings.baseline, keep=False)
        self._recent: dict[str, deque[float]] = {}

    def measure(
        self,
        gradients: Mapping[str, Tensor],
        clean: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        real: Tensor | None = None,
    ) -> dict[str, float]:
        """Return the leak AUC of every attack on what each party gets.

        Parameters
        ----------
        gradients : Mapping[str, Tensor]
            What leaves, by party.
        clean : Mapping[str, Tensor]
            The same before the defense.
        labels : Tensor
            Labels of the batch.
        step : int
            The training step.
        real : Tensor | None (default: None)
            Which labels are real; the attacks look for these alone. None for all.

        Returns
        -------
        dict[str, float]
            ``leak_norm/passive-1`` and so on, raw and flipped; and
            ``leak_limit/party``, the average that exceeds the limit, where one does;
            and ``member_spectral/party``, how well the party tells synthetic labels
            from real ones; and ``success_direct/party``, what the direct attack gets
            right.
        """
        if not gradients or step % self.settings.every:
            return {}
        metrics = {}
        if self.settings.membership and real is not None:
            metrics = self._members(gradients, real)
        if not self.meter.attacks:
            return metrics
        if real is not None:
            gradients = {name: part[real] for name, part in gradients.items()}
            clean = {name: part[real] for name, part in clean.items()}
            labels = labels[real]
        together = self._coalitions(gradients)
        found = self.meter.pairs(gradients, labels, step, clean, coalitions=together)
        for party, values in found.items():
            for attack, (raw, flipped) in values.items():
                metrics[f"{LEAK}_{attack}/{party}"] = raw
                metrics[f"{FLIPPED}_{attack}/{party}"] = flipped
        if self._reads_labels:
            for party, gradient in gradients.items():
                success = direct_success(gradient, labels)
                if not math.isnan(success):
                    metrics[f"{DIRECT_SUCCESS}/{party}"] = success
        if self.settings.limit is not None:
            metrics |= self._exceeded(metrics, step)
        return metrics

    def measure_layers(
        self, gradients: Mapping[str, Tensor], labels: Tensor, step: int
    ) -> dict[str, float]:
        """Return the leak AUC of every attack on every layer of one party's model.

        Parameters
        ----------
        gradients : Mapping[str, Tensor]
            Gradient of the output of each layer; one that has not one row per label,
            such as a layer that works on words or pixels as rows, is left out.
        labels : Tensor
            Labels of the batch.
        step : int
            The training step.
        """
        return {
            f"{kind}_{attack}@{layer}": value
            for layer, gradient in gradients.items()
            if gradient.ndim and len(gradient) == len(labels)
            for attack, pair in self.meter.pairs({layer: gradient}, labels, step)[
                layer
            ].items()
            for kind, value in zip((LEAK, FLIPPED), pair, strict=True)
        }

    def _members(
        self, gradients: Mapping[str, Tensor], real: Tensor
    ) -> dict[str, float]:
        """Return how well each party tells synthetic labels from real ones."""
        return {
            f"{MEMBER_GRADIENT}{kind}/{name}": auc
            for name, part in gradients.items()
            for kind, auc in membership_aucs(part, real).items()
        }

    def _coalitions(self, gradients: Mapping[str, Tensor]) -> list[list[str]]:
        coalitions = []
        for text in self.settings.coalitions:
            members = self.settings.members(text, gradients)
            if len(present := [m for m in members if m in gradients]) > 1:
                coalitions.append(present)
        return coalitions

    def _exceeded(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the worst average of each party that exceeds the limit."""
        worst: dict[str, tuple[float, str]] = {}
        settings, regression = self.settings, self.meter.task == "regression"
        assert settings.limit is not None  # the caller looked
        for name, value in metrics.items():
            kind, _, party = name.partition("/")
            skipped = kind.startswith(FLIPPED) or not kind.startswith(LEAK)
            if skipped or party.endswith("/random"):
                continue
            recent = self._recent.setdefault(name, deque(maxlen=settings.window))
            # The sign of rho is that of whichever column was the best in a batch.
            recent.append(abs(value) if regression else value)
            # Flipped after the average: chance alone would add up otherwise.
            average = sum(recent) / len(recent)
            average = average if regression else max(average, 1.0 - average)
            if len(recent) == settings.window and average > settings.limit:
                attack = kind.removeprefix(f"{LEAK}_")
                worst[party] = max((average, attack), worst.get(party, (0.0, "")))
        for party, (average, attack) in worst.items():
            log(
                WARNING,
                "step %d: the %s attack on the gradients of '%s' has a leak AUC of "
                "%.3f over %d steps; the limit is %.3f",
                *(step, attack, party, average, settings.window, settings.limit),
            )
        if worst:
            self._recent.clear()  # said once per window; what follows is measured anew
        return {f"{LIMIT}/{party}": average for party, (average, _) in worst.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the values that the limit looks at."""
        return {name: list(values) for name, values in self._recent.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Parameters
        ----------
        state : dict[str, Any]
            As :meth:`state_dict` returned it.
        """
        window = self.settings.window
        self._recent = {name: deque(v, maxlen=window) for name, v in state.items()}
