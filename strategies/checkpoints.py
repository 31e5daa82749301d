"""The strategy's own part of every checkpoint."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import DirectoryStore, outdated, tagged_step

from .setup import RESERVED


@dataclass(frozen=True)
class Checkpoints:
    """When and where a run is saved.

    Parameters
    ----------
    every : int (default: 0)
        Steps between checkpoints at every party; 0 for none.
    folder : str | Path | None (default: None)
        Where the strategy keeps its own part of every checkpoint; None keeps it in
        memory. Parties keep theirs in the ``state-dir`` of their node config.
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
        """Refuse a negative interval."""
        if self.every < 0:
            raise ConfigError(f"every must not be negative, got {self.every}")


class StrategyCheckpoints:
    """Keeps what the strategy knows with each checkpoint of the parties."""

    def __init__(self, folder: str | Path | None) -> None:
        self.kept: dict[str, dict[str, Any]] = {}  # by tag, of this run only
        self._store = DirectoryStore(Path(folder) / RESERVED) if folder else None

    def save(self, tag: str, state: dict[str, Any]) -> None:
        """Keep a state."""
        self.kept[tag] = copy.deepcopy(state)
        for old in outdated(list(self.kept), tag):
            del self.kept[old]
        if self._store is not None:
            self._store.save(tag, state)

    def load(self, tag: str) -> dict[str, Any] | None:
        """Return a copy of what was kept, None if nothing was."""
        state = self.kept.get(tag)
        if state is None and self._store is not None and tag in self._store.tags():
            state = self.kept[tag] = self._store.load(tag)
        return copy.deepcopy(state)

    def advice(self) -> str:
        """Return what to do after an error."""
        steps = [step for tag in self.kept if (step := tagged_step(tag)) is not None]
        if not steps:
            return (
                "No checkpoint was kept; set Checkpoints(every=...) to be able to "
                "resume."
            )
        return f"The newest checkpoint is of step {max(steps)}: start with resume=True."
