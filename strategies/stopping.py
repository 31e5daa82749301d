"""When to stop before the last epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flower_vfl.errors import ConfigError

from .state import RunState

LOWER_IS_BETTER = ("loss", "rmse", "ace")


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when the validation rows have not improved for some evaluations.

    Parameters
    ----------
    patience : int (default: 5)
        Evaluations without improvement after which training stops.
    metric : str | None (default: None)
        ``"auc"``, ``"accuracy"``, ``"pearson"``, ``"loss"``, ...; None takes the main
        metric of the task.
    min_delta : float (default: 0.0)
        What counts as an improvement.
    restore_best : bool (default: True)
        Whether all parties go back to the best epoch at the end.
    """

    patience: int = 5
    metric: str | None = None
    min_delta: float = 0.0
    restore_best: bool = True

    def __post_init__(self) -> None:
        """Refuse settings under which training would never start or never stop."""
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")

    def improves(self, value: float, best: float | None, metric: str) -> bool:
        """Return whether a value is better than the best so far."""
        if best is None:
            return True
        gain = best - value if metric in LOWER_IS_BETTER else value - best
        return gain > self.min_delta

    def judge(self, state: RunState, metrics: Mapping[str, float], main: str) -> bool:
        """Take in an evaluation; return whether it is the best so far."""
        metric = self.metric or main
        name = f"valid_{metric}"
        if name not in metrics:
            raise ConfigError(
                f"early stopping looks at '{name}', which was not measured; measured "
                f"were {', '.join(metrics) or 'none'}. Set valid_fraction, or another "
                "metric"
            )
        if self.improves(metrics[name], state.best, metric):
            state.best, state.stale = metrics[name], 0
            return True
        state.stale += 1
        if state.stale >= self.patience:
            state.stopped, state.reason = True, f"{name} no longer improved"
        return False
