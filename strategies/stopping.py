"""When to stop before the last epoch."""

from __future__ import annotations

from dataclasses import dataclass

from flower_vfl.errors import ConfigError

LOWER_IS_BETTER = ("loss", "rmse")


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
        """Return whether a value is better than the best so far.

        Parameters
        ----------
        value : float
            The new value.
        best : float | None
            The best so far; None if there is none.
        metric : str
            Which metric it is.
        """
        if best is None:
            return True
        gain = best - value if metric in LOWER_IS_BETTER else value - best
        return gain > self.min_delta
