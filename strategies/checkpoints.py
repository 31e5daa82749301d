"""The strategy's own part of every checkpoint, which makes it a whole one."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import RecordDict
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyRestartedError, require
from flower_vfl.leakage.monitor import LIMIT
from flower_vfl.parties.checkpoints import (
    FINAL,
    DamagedError,
    DirectoryStore,
    RecordStore,
    step_tag,
    steps_of,
    tagged_step,
    writing,
)
from flower_vfl.protocol.config import Value
from flower_vfl.protocol.messages import Content

from .setup import RESERVED

if TYPE_CHECKING:
    from .vertical import VerticalStrategy

_SAME_STEP_REWINDS = 3  # as often may one step be tried again before giving up
# As often may one party make a run go back: each time it sees other noise on gradients
# of the same rows, whose mean tells more than one of them.
_PARTY_REWINDS = 10
_KEEP = 2  # step checkpoints of a run: the newest and the one before
# Settings that may change when a run is resumed: how long it is, what it shows and
# where it runs. Files may have moved; their content is compared.
MAY_CHANGE = """
    epochs checkpoint_every resume out state_dir track capture train_metrics timeout
    threads device watch_memory transport address advertise certificate private_key
    root_certificate insecure silence nodes data_dir label_party passive
"""
# Those that may change, too, when the run was stopped by its leak limit.
_PROTECTION = ("defense", "leak", "attack", "coalitions")


@dataclass(frozen=True)
class Checkpoints:
    """When and where a run is saved.

    Parameters
    ----------
    every : int (default: 0)
        Steps between checkpoints at every party; 0 for none.
    folder : str | Path | None (default: None)
        Where the strategy keeps its own part of every checkpoint; None keeps it in
        memory, for parties that come back during the run, and the run cannot be
        resumed. Parties keep theirs in the ``state-dir`` of their node config.
    keep_final : bool (default: False)
        Whether every party keeps a checkpoint ``"final"`` at the end.

    Examples
    --------
    >>> from flower_vfl.strategies import Checkpoints, VerticalStrategy
    >>> strategy = VerticalStrategy(checkpoints=Checkpoints(every=100, folder="state"))
    """

    every: int = 0
    folder: str | Path | None = None
    keep_final: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 0, "every", "at least 0", self.every)


class StrategyCheckpoints:
    """The strategy's parts of checkpoints, each with the digests of all parties' parts.

    This part is written last: a checkpoint without it does not exist.
    """

    def __init__(self, strategy: VerticalStrategy) -> None:
        self._store = RecordStore(RecordDict())  # in memory
        if folder := strategy.checkpoints.folder:
            self._store = DirectoryStore(Path(folder) / RESERVED)
        self._store.clean()
        self.run = secrets.token_hex(16)  # id of the run; a resumed one keeps its own
        self._settings = _settings(strategy)
        self._best: dict[str, str] = {}  # by tag: the best weights that it refers to

    def begin(self) -> None:
        """Give up an earlier run in the same folder."""
        with writing(RESERVED, FINAL):
            self._store.remove(FINAL)
            self._store.prune(())

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, the newest first."""
        return steps_of(self._store.tags())

    def request(self, tag: str) -> dict[str, Value]:
        """Return what the parties are told: what to write, and what to keep."""
        return {"tag": tag, "run": self.run, "keep": self._store.tags()}

    def commit(
        self, tag: str, state: dict[str, Any], digests: Mapping[str, str]
    ) -> None:
        """Write the strategy's part, and remove what nothing refers to any more."""
        self._best[tag] = state["run"]["best_tag"]
        kept = {tag, *map(step_tag, steps_of(self._best)[:_KEEP])}
        self._best = {each: self._best[each] for each in kept}
        known = {"parties": dict(digests), "settings": self._settings, "id": self.run}
        with writing(RESERVED, tag):
            self._store.save(tag, {**state, **known}, self.run)
            self._store.prune({*kept, *self._best.values()})

    def load(
        self, tag: str, names: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, Content]]:
        """Return the strategy's part of a tag, and what every party is told."""
        parts = {tag: (part := self._load(tag))}
        if tagged_step(tag) is not None:
            _compare(part, self._settings)
            if best := part["run"]["best_tag"]:  # all must have it, too
                parts[best] = self._load(best, part["id"])
        if part["parties"].keys() != set(names):
            then, now = ", ".join(part["parties"]), ", ".join(names)
            raise ConfigError(f"checkpoint '{tag}' had the parties {then}, now {now}")
        told = {"tags": list(parts), "run": part["id"]}
        digests = {n: [p["parties"][n] for p in parts.values()] for n in names}
        return part, {n: Content({**told, "digests": digests[n]}) for n in names}

    def _load(self, tag: str, run: str = "") -> dict[str, Any]:
        try:
            return self._store.load(tag, run)
        except DamagedError as error:
            raise DamagedError(f"strategy: {error}") from None

    def adopt(
        self, tag: str, part: Mapping[str, Any], replies: Mapping[str, Content]
    ) -> None:
        """Go on with the run of a checkpoint, unless a party says it is damaged."""
        damaged = [name for name in replies if "damaged" in replies[name].config]
        told = [f"party '{name}': {replies[name].text('damaged')}" for name in damaged]
        if told:
            raise DamagedError("; ".join(told))
        self.run = part["id"]
        if tagged_step(tag) is not None:
            self._best = {tag: part["run"]["best_tag"]}

    def advice(self) -> str:
        """Return what to do after an error."""
        if not (steps := self.steps()) or not isinstance(self._store, DirectoryStore):
            remedy = "set Checkpoints(every=..., folder=...) to be able to resume."
            return f"No checkpoint was kept; {remedy}"
        return f"The newest checkpoint is of step {steps[0]}: start with resume=True."


class Rewinds:
    """Counts how often a run went back, and ends one that goes back too often."""

    def __init__(self) -> None:
        self._at: Counter[int] = Counter()
        self._by: Counter[str] = Counter()

    def count(self, error: PartyRestartedError, step: int) -> None:
        """Note that a party made the run go back at a step, or raise its error."""
        self._at = Counter({step: self._at[step] + 1})
        self._by[error.party] += 1
        if self._at[step] > _SAME_STEP_REWINDS:
            error.add_note(f"step {step + 1} was tried {self._at[step]} times")
        elif self._by[error.party] > _PARTY_REWINDS:
            error.add_note(f"it made the run go back {_PARTY_REWINDS} times before")
        else:
            return
        raise error


def _settings(strategy: VerticalStrategy) -> dict[str, str]:
    """Return the settings that a resumed run must share; its notes come first."""
    defense = strategy.defense
    names = "seed batch_size aggregation test_fraction valid_fraction evaluate_every "
    names += "early_stopping leakage sealed pipeline"
    own = {name: getattr(strategy, name) for name in names.split()}
    if defense.transforms:
        own["defense"] = f"{defense.name} at the {defense.at}"
    own["compression"] = str(strategy.compression)
    if strategy.local_updates.steps > 1:
        own["local_steps"] = strategy.local_updates
    own |= {"learning_rate": strategy.rates or None, "noise_seed": defense.noise_seed}
    fixed = [n for n in strategy.notes if _field(n) not in MAY_CHANGE.split()]
    given = {**{n: strategy.notes[n] for n in fixed}, **own}.items()
    return {name: str(value) for name, value in given if value not in ("", None)}


def _field(name: str) -> str:
    return name.replace("-", "_")


def _compare(part: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Refuse to go on with other settings, unless the leak limit asked for them."""
    was, run = part["settings"], part["run"]
    limits = zip(run["records"]["metric"], run["records"]["step"], strict=True)
    stopped = (LIMIT, run["step"]) in limits
    for name in {**was, **now}:
        old, new = (each.get(name, "not set") for each in (was, now))
        changed = f"{name} was {old} in the run that is resumed, now {new}"
        again = f"with {old}" if name in was else "without it"
        allowed = stopped and _field(name).startswith(_PROTECTION)
        if old != new and not allowed:
            raise ConfigError(f"{changed}; resume {again}, or start without resume")
        if old != new:
            log(WARNING, "%s, after the leak limit was exceeded", changed)
