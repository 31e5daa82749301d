"""Label Inference Attacks Against Vertical Federated Learning: the direct attack.

Fu et al., USENIX Security 2022. Without a top model the gradient of summed logits is
p − y, whose sign shows the label.
"""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flower_vfl.errors import ConfigError

from .known import Known, as_rows, finite_norms


def direct_attack(gradient: Tensor, hard: bool = True) -> Tensor:
    """Read the labels off the gradient of summed logits, p − y.

    Parameters
    ----------
    gradient : Tensor
        One column for a binary task, one per class otherwise.
    hard : bool (default: True)
        Return class numbers: 1 where the one column is negative, or the index of the
        smallest entry. False returns −g as the score.

    Examples
    --------
    >>> import torch
    >>> direct_attack(torch.tensor([[0.3], [-0.7]])).tolist()
    [0, 1]
    """
    rows = as_rows(gradient)
    finite_norms(rows)  # refuses what is not finite
    if rows.shape[1] == 1:
        return (rows[:, 0] < 0).long() if hard else -rows[:, 0]
    return rows.argmin(dim=1) if hard else -rows


def direct_success(gradient: Tensor, labels: Tensor) -> float:
    """Return the direct attack's F1 for two classes, accuracy for more, as in LADSG.

    Parameters
    ----------
    gradient, labels : Tensor
        As for :func:`direct_attack`, and class numbers; NaN if none is of class 1.

    Examples
    --------
    >>> import torch
    >>> direct_success(torch.tensor([[0.3], [-0.7]]), torch.tensor([0, 1]))
    1.0
    """
    guessed = direct_attack(gradient)
    truth = labels.to(guessed).reshape(-1)
    if gradient.flatten(1).shape[1] > 2:
        return float((guessed == truth).double().mean())
    if not truth.any():
        return math.nan
    # Measured at every step: scikit-learn's f1_score takes a millisecond.
    hits, wrong = int((guessed * truth).sum()), int((guessed != truth).sum())
    return 2.0 * hits / (2.0 * hits + wrong)


@dataclass(frozen=True)
class DirectAttack:
    """The direct attack by name; every column is a score of a regression."""

    hard: bool = True

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return the negative gradient, or the choice that it amounts to."""
        rows, width = gradient, gradient.shape[1]
        if known.task == "regression":
            return rows
        binary = known.task == "binary"
        if width > 2 if binary else width <= max(known.classes):
            wanted = "1 or 2" if binary else "one per class"
            problem = "the direct attack reads the gradient of summed logits, with"
            raise ConfigError(f"{problem} columns {wanted}; this one has {width}")
        scores = direct_attack(rows, self.hard).to(rows)
        if binary:
            return scores if scores.ndim == 1 else scores[:, 1] - scores[:, 0]
        if self.hard:
            scores = F.one_hot(scores.long(), width).to(rows)
        return scores[:, list(known.classes)]
