"""What is to be measured about the gradients that leave, and what they may not leak."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from flower_vfl.errors import ConfigError, check_name, unknown_name

LeakAction = Literal["warn", "stop", "raise"]
ACTIONS: tuple[LeakAction, ...] = get_args(LeakAction)
Membership = Literal["", "own", "joint"]
MEMBERSHIPS: tuple[Membership, ...] = get_args(Membership)


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
