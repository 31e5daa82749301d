"""Label differential privacy: how labels are randomised, and what is promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.specs import build_from_spec

from .mechanisms import (
    Gaussian,
    Laplace,
    Mechanism,
    RandomizedResponse,
    gaussian_mu,
    laplace_epsilon,
)

if TYPE_CHECKING:
    from flower_vfl.objectives import Task

Kind = Literal["auto", "randomised-response", "laplace", "gaussian"]
Loss = Literal["auto", "plain", "unbiased", "forward"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
DEFAULT_LOSS: Loss = "forward"  # where no validation rows can choose


@dataclass(frozen=True)
class LabelPrivacy:
    """How labels are randomised, once and before training, and what is promised.

    Over the whole training, for all parties together, for the server and for the
    trained model: two worlds that differ in one training label are told apart with at
    most this AUC, or change the odds of that label by at most a factor e^ε. See
    docs/guarantees.md.

    Parameters
    ----------
    auc : float | None (default: None)
        The AUC that is promised, between 0.5 and 1. Give this or `epsilon`.
    epsilon : float | None (default: None)
        ε of label differential privacy.
    mechanism : {"auto", "randomised-response", "laplace", "gaussian"}
        ``"auto"`` takes randomised response for classes and Laplace for a regression.
    loss : {"auto", "plain", "unbiased", "forward"} (default: "auto")
        What is made of randomised labels: ``"plain"`` learns them as they are,
        ``"unbiased"`` corrects them by the inverse of the mechanism, ``"forward"``
        maximises their likelihood through the mechanism; for a regression that is the
        absolute error. ``"auto"`` trains with each and keeps the best by randomised
        validation labels; without validation rows it takes ``"forward"``.
    delta : float (default: 1e-5)
        δ for which the ε of Gaussian noise is meant.
    prior : tuple[float, ...] (default: ())
        Publicly known shares of the classes: unlikely ones may then never be answered.
    low, high : float | None (default: None)
        Range of the labels of a regression, publicly known; values are clipped to it.
    key : int | None (default: None)
        The secret that draws are made from, of up to 256 bits. None draws one for every
        run; one that is resumed, or set up again, keeps it. Trainings with the same key
        reveal no more than one of them.
    ledger : str (default: "")
        A file of the label party that keeps the key, and what trainings have revealed
        so far: those with other draws add up.
    budget : str (default: "")
        ``"auc=0.7"`` or ``"epsilon=1"``: refuse a run that cannot promise it, together
        with earlier ones in the ledger. May stand without `auc` and `epsilon`.
    canaries : int (default: 0)
        Training rows whose label is one of two at random, to measure how well these
        are told apart; an audit, which makes the model a little worse.

    Examples
    --------
    >>> from flower_vfl import LabelPrivacy
    >>> privacy = LabelPrivacy(auc=0.65)
    >>> round(privacy.mechanism_for("binary", 2).epsilon, 2)
    0.62
    >>> LabelPrivacy.from_text("epsilon=1,loss=plain").loss
    'plain'
    """

    auc: float | None = None
    epsilon: float | None = None
    mechanism: Kind = "auto"
    loss: Loss = "auto"
    delta: float = 1e-5
    prior: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    key: int | None = None
    ledger: str = ""
    budget: str = ""
    canaries: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        limits = [each for each in (self.auc, self.epsilon) if each is not None]
        if len(limits) > 1 or not (limits or self.budget or self.canaries):
            raise ConfigError("label privacy takes either auc=0.65 or epsilon=1")
        if self.budget:
            self.budget_limit()
        check_name("mechanism", self.mechanism, get_args(Kind))
        check_name("loss of private labels", self.loss, LOSSES)
        if self.auc is not None:
            require(0.5 < self.auc < 1.0, "auc", "between 0.5 and 1", self.auc)
        if self.epsilon is not None:
            require(self.epsilon > 0.0, "epsilon", "above 0", self.epsilon)
        require(0.0 < self.delta < 0.1, "delta", "between 0 and 0.1", self.delta)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the settings of a config string, e.g. ``"auc=0.65,loss=plain"``."""
        kind = "setting"
        return build_from_spec(kind, f"label-dp:{text}", {"label-dp": cls})

    def budget_limit(self) -> tuple[str, float]:
        """Return what the budget limits, and to how much."""
        name, _, value = self.budget.partition("=")
        check_name("kind of label budget", name.strip(), ("auc", "epsilon"))
        try:
            return name.strip(), float(value)
        except ValueError:
            raise ConfigError(f"'{self.budget}' is not a budget like auc=0.7") from None

    def mechanism_for(self, task: Task, classes: int) -> Mechanism | None:
        """Return the mechanism for a kind of labels; None if none is asked for."""
        if self.auc is None and self.epsilon is None:
            return None
        kind = self.mechanism
        regression = task == "regression"
        if kind == "auto":
            kind = "laplace" if regression else "randomised-response"
        if regression != (kind == "laplace") and kind != "gaussian":
            raise ConfigError(f"the mechanism '{kind}' is not for a {task} task")
        low, high = 0.0, 1.0
        if regression:
            if self.low is None or self.high is None or not self.low < self.high:
                raise ConfigError(
                    "label privacy of a regression needs a public range, low=... and "
                    "high=...; a range taken from the labels would reveal them"
                )
            low, high = self.low, self.high
        if kind == "gaussian":
            mu = gaussian_mu(self.auc, self.epsilon, self.delta)
            return Gaussian(mu, self.delta, 0 if regression else classes, low, high)
        if kind == "laplace":
            return Laplace(self.epsilon or laplace_epsilon(self.auc or 0.0), low, high)
        epsilon = self.epsilon
        if epsilon is None:
            epsilon = float(torch.logit(torch.tensor(self.auc, dtype=torch.float64)))
        return RandomizedResponse(epsilon, classes, self.prior)
