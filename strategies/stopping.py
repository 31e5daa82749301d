"""Early stopping on validation metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from flower_vfl.errors import ConfigError

from .state import RunState

LOWER_IS_BETTER = ("loss", "rmse", "ace")


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when a validation metric has not improved for some evaluations.

    Parameters
    ----------
    patience : int (default: 5)
        Evaluations without improvement after which training stops.
    metric : str | None (default: None)
        ``"auc"``, ``"accuracy"``, ``"pearson"``, ``"loss"``, ...; None uses the main
        metric of the task.
    min_delta : float (default: 0.0)
        Smallest change that counts as an improvement.
    restore_best : bool (default: True)
        Whether all parties restore their weights of the best epoch at the end.

    Examples
    --------
    >>> from flower_vfl.strategies import EarlyStopping, VerticalStrategy
    >>> stopping = EarlyStopping(patience=3, metric="loss")
    >>> strategy = VerticalStrategy(valid_fraction=0.2, early_stopping=stopping)
    >>> stopping.improves(0.6, best=0.7, metric="loss")
    True
    """

    patience: int = 5
    metric: str | None = None
    min_delta: float = 0.0
    restore_best: bool = True

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")

    def improves(self, value: float, best: float | None, metric: str) -> bool:
        """Return whether a value is better than the best so far."""
        if best is None:
            return True
        gain = best - value if metric in LOWER_IS_BETTER else value - best
        return gain > self.min_delta

    def judge(self, state: RunState, metrics: Mapping[str, float], main: str) -> bool:
        """Update a run's state after an evaluation; return whether it is the best."""
        metric = self.metric or main
        name = f"valid_{metric}"
        if name not in metrics:
            raise ConfigError(
                f"early stopping needs '{name}', which was not measured; "
                f"available: {', '.join(metrics) or 'none'}. Set valid_fraction, "
                "another metric, or report-metrics at the label party's node"
            )
        if self.improves(metrics[name], state.best, metric):
            state.best, state.stale = metrics[name], 0
            return True
        state.stale += 1
        if state.stale >= self.patience:
            state.stopped, state.reason = True, f"{name} no longer improved"
        return False
