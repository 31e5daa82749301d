"""Leakage as a training metric: attacks on every gradient that leaves, and a limit."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from logging import WARNING
from typing import TYPE_CHECKING, Any, Literal, get_args

from flwr.supercore import log
from torch import Tensor

from flower_vfl.errors import ConfigError, check_name, unknown_name
from flower_vfl.leakage.attacks.direct import direct_success
from flower_vfl.leakage.attacks.registry import OF_AN_EPOCH
from flower_vfl.leakage.attacks.spectral import membership_aucs
from flower_vfl.objectives import Task
from flower_vfl.records import Measurement, from_columns, to_columns
from flower_vfl.specs import parse_spec

from .epochs import EpochAttacks
from .meter import FLIPPED as FLIPPED
from .meter import LEAK as LEAK
from .meter import LeakageMeter, StepBatch

if TYPE_CHECKING:
    from .canaries import Canaries

LeakAction = Literal["warn", "stop", "raise"]
ACTIONS: tuple[LeakAction, ...] = get_args(LeakAction)
Membership = Literal["", "own", "joint"]
MEMBERSHIPS: tuple[Membership, ...] = get_args(Membership)
# Centers of the batch itself find a leak even in noise: such a limit would never hold.
FOR_A_LIMIT = ("norm", "cosine", "mean:held_out=true")
_STEPS, _ENTRIES = 8, 2**21  # that wait to be measured at once
LIMIT, SUCCESS, MEMBERSHIP = "leak_limit", "success", "membership"


@dataclass(frozen=True)
class Leakage:
    """What is measured about the gradients that leave, and what must not be exceeded.

    Parameters
    ----------
    attacks : tuple[str, ...] (default: ())
        Score attacks by name, perhaps with parameters: ``"norm"``,
        ``"mean:hard=true"``; none takes those that fit the task, and with a limit
        norm, cosine and ``"mean:held_out=true"``. ``"stale"``, ``"similarity"``,
        ``"embedding"`` and ``"exploit"`` are measured at the end of each epoch, on all
        of its rows; a limit does not look at them.
    limit : float | None (default: None)
        Maximum leak AUC allowed for any attack and party, averaged over `window` steps
        (or 1 minus it, if that is larger); for a regression, of |rho|.
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

    Examples
    --------
    >>> from flower_vfl import Leakage, VerticalStrategy
    >>> limit = Leakage(attacks=("norm", "cosine"), limit=0.65, action="stop")
    >>> strategy = VerticalStrategy(leakage=limit)
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
        check_name("action", self.action, ACTIONS)
        check_name("membership", self.membership, MEMBERSHIPS)
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

    @property
    def by_epoch(self) -> tuple[str, ...]:
        """The attacks on all rows of an epoch."""
        names = {text: parse_spec(text)[0] for text in self.attacks}
        return tuple(text for text, name in names.items() if name in OF_AN_EPOCH)

    def members(self, coalition: str, parties: Iterable[str]) -> list[str]:
        """Return who is in a coalition."""
        if coalition.strip() == "all":
            return list(parties)
        return [name.strip() for name in coalition.split("+")]

    def check_parties(self, parties: Collection[str]) -> None:
        """Refuse a coalition that cannot be one."""
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
        """Return the settings that a text holds."""
        values: dict[str, Any] = json.loads(text)
        for name in ("attacks", "coalitions"):
            values[name] = tuple(values[name])
        return cls(**values)


class LeakageMonitor:
    """Measures every batch of gradients that leaves, and compares it with a limit."""

    def __init__(self, settings: Leakage, task: Task) -> None:
        self.settings = settings
        by_epoch, limited = settings.by_epoch, settings.limit is not None
        attacks = tuple(a for a in settings.attacks if a not in by_epoch) or None
        if attacks is None and limited and task != "regression":
            attacks = FOR_A_LIMIT
        alone = by_epoch and not (limited or settings.layers)
        if settings.membership_only or (attacks is None and alone):
            attacks = ()
        wider = settings.layers or settings.coalitions
        direct = "direct" in [parse_spec(text)[0] for text in attacks or ()]
        self._reads_labels = direct and task != "regression"
        if wider and self._reads_labels:
            raise ConfigError(
                "the direct attack reads one party's summed logits; measure it without "
                "layers and coalitions"
            )
        self.meter = LeakageMeter(attacks, task, settings.baseline)
        self._recent: dict[tuple[str, str], deque[float]] = {}  # by party and attack
        self._waiting: list[StepBatch] = []
        self._late: list[Measurement] = []
        self._by_epoch = EpochAttacks(by_epoch, task, settings.baseline)
        self.needs_rows = bool(by_epoch)  # and embeddings of a batch
        self.canaries: Canaries | None = None

    def measure(
        self,
        gradients: Mapping[str, Tensor],
        clean: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        real: Tensor | None = None,
        rows: Tensor | None = None,
        last: bool = False,
        embeddings: Mapping[str, Tensor] | None = None,
        late: bool = False,
    ) -> list[Measurement]:
        """Return the leak AUC of every attack on what each party gets.

        Attacks on an epoch and the canaries' audit are measured at its `last` step. If
        `late`, the results may be returned by a later call, because several steps are
        measured faster together; with a limit, they are always returned at once.
        """
        found: list[Measurement] = []
        due = bool(gradients) and step % self.settings.every == 0
        if due and self.settings.membership and real is not None:
            for party, gradient in gradients.items():
                aucs = membership_aucs(gradient, real)
                found += members("spectral", aucs, step, party)
        if real is not None:
            gradients = {name: part[real] for name, part in gradients.items()}
            clean = {name: part[real] for name, part in clean.items()}
            labels, rows = labels[real], None if rows is None else rows[real]
            embeddings = {n: part[real] for n, part in (embeddings or {}).items()}
        if self.needs_rows or self.canaries is not None:
            if rows is None:
                raise ConfigError(
                    "an attack on an epoch has to know the numbers of the rows"
                )
            self._by_epoch.add(gradients, embeddings or {}, labels, rows, step)
            if last and (parties := self._by_epoch.parties):
                found += self._by_epoch.measure(step, self._coalitions(parties))
                found += self.canaries.measure(parties, step) if self.canaries else []
        if due and self.meter.attacks:
            given = gradients, labels, step, clean, "", self._coalitions(gradients)
            self._waiting.append(StepBatch(*given))
            if self._reads_labels:
                for party, gradient in gradients.items():
                    success = direct_success(gradient, labels)
                    if not math.isnan(success):
                        at = step, party, "direct"
                        found.append(Measurement(SUCCESS, success, *at))
        limited = self.settings.limit is not None
        if late and not (last or limited) and self._may_wait():
            return found
        self._measure_waiting()
        leaks, self._late = self._late, []
        return leaks + found + (self._exceeded(leaks, step) if limited else [])

    def _may_wait(self) -> bool:
        """Say whether there is room for the gradients of another step."""
        kept = [g for each in self._waiting for g in each.gradients.values()]
        return len(self._waiting) < _STEPS and sum(map(Tensor.numel, kept)) < _ENTRIES

    def _measure_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._late += self.meter.measure_steps(waiting)

    def measure_layers(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        party: str,
        clean: Mapping[str, Tensor] | None = None,
    ) -> list[Measurement]:
        """Return the leak AUC of every attack on every layer of one party's model."""
        found: list[Measurement] = []
        for layer, gradient in gradients.items():
            if gradient.ndim and len(gradient) == len(labels):
                given = {party: _channels_last(gradient)}
                before = {}
                if clean and layer in clean:
                    before = {party: _channels_last(clean[layer])}
                found += self.meter.measure(given, labels, step, before, layer)
        return found

    def _coalitions(self, gradients: Collection[str]) -> list[list[str]]:
        coalitions = []
        for text in self.settings.coalitions:
            members = self.settings.members(text, gradients)
            if len(present := [m for m in members if m in gradients]) > 1:
                coalitions.append(present)
        return coalitions

    def _exceeded(self, leaks: Iterable[Measurement], step: int) -> list[Measurement]:
        """Return the worst average of each party that exceeds the limit."""
        worst: dict[str, tuple[float, str]] = {}
        settings, regression = self.settings, self.meter.task == "regression"
        assert settings.limit is not None  # the caller looked
        for leak in leaks:
            if leak.metric != LEAK:
                continue
            key = leak.party, leak.attack
            recent = self._recent.setdefault(key, deque(maxlen=settings.window))
            # The sign of rho is that of whichever column was the best in a batch.
            recent.append(abs(leak.value) if regression else leak.value)
            # Flipped after the average: chance alone would add up otherwise.
            average = sum(recent) / len(recent)
            average = average if regression else max(average, 1.0 - average)
            if len(recent) == settings.window and average > settings.limit:
                so_far = worst.get(leak.party, (0.0, ""))
                worst[leak.party] = max((average, leak.attack), so_far)
        for party, (average, attack) in worst.items():
            log(
                WARNING,
                "step %d: the %s attack on the gradients of '%s' has a leak AUC of "
                "%.3f over %d steps; the limit is %.3f",
                *(step, attack, party, average, settings.window, settings.limit),
            )
        if worst:
            self._recent.clear()  # said once per window; what follows is measured anew
        return [
            Measurement(LIMIT, average, step, party, attack)
            for party, (average, attack) in worst.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return what limit and attacks on an epoch need, and what has not left yet."""
        self._measure_waiting()
        recent = [[*key, list(values)] for key, values in self._recent.items()]
        late = to_columns(self._late)
        return {"recent": recent, "late": late, "by_epoch": self._by_epoch.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        window = self.settings.window
        self._recent = {
            (party, attack): deque(values, maxlen=window)
            for party, attack, values in state["recent"]
        }
        self._waiting, self._late = [], from_columns(state["late"])
        self._by_epoch.load_state_dict(state["by_epoch"])


def members(
    attack: str, aucs: Mapping[str, float], step: int, party: str
) -> list[Measurement]:
    """Return what a membership attack found; a kind extends the attack's name."""
    return [
        Measurement(MEMBERSHIP, auc, step, party, f"{attack}{kind}")
        for kind, auc in aucs.items()
    ]


def _channels_last(gradient: Tensor) -> Tensor:
    """Return maps in the order of their memory, whose rows are no copy."""
    return gradient.movedim(1, -1) if gradient.ndim == 4 else gradient
