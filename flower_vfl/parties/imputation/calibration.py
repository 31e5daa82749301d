"""Calibration: undoes the effect of synthetic data on predicted probabilities.

Sun et al., FLORIST, appendices E to G (after Chapelle et al., Simple and Scalable
Response Prediction for Display Advertising). https://arxiv.org/abs/2106.05508

With synthetic features in some rows, the model learns a mixture of D(y|x) and the class
frequencies π. With synthetic labels, it also learns their distribution s. With c the
share of rows that all parties hold, and p the share with a real label,

    D'(y|x) = c·D(y|x) + (p − c)·π + (1 − p)·s

For majority labels of a rare positive class s = 0, and if parties hold rows
independently of each other c = p_a·p_p: the paper's equation 3. Labels drawn from the
model's own prediction (``random_pred``) have s = D', and p cancels out:

    D'(y|x) = (c/p)·D(y|x) + (1 − c/p)·π

This assumes that whether a party holds a row does not depend on the label. It is exact
for one passive party. With several, rows of which only some features are real count as
rows with synthetic features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.errors import ConfigError, check_name

When = Literal["te", "tr"]
WHEN: tuple[When, ...] = get_args(When)
_BEND = 1e-3


def mixed(probabilities: Tensor, weight: float, offset: Tensor) -> Tensor:
    """Return D' = weight·D + offset."""
    return weight * probabilities + offset.to(probabilities)


def unmixed(probabilities: Tensor, weight: float, offset: Tensor) -> Tensor:
    """Return D = (D' − offset)/weight as probabilities.

    Predictions may lie outside of the mixture, and clipping them would make ties. A
    hyperbola bends values below 0.001 instead: it stays above 0 and keeps the order.
    """
    inverse = (probabilities - offset.to(probabilities)) / weight
    low = _BEND**2 / (2 * _BEND - inverse.clamp_max(_BEND))
    bent = torch.where(inverse < _BEND, low, inverse)
    return bent / bent.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class Calibration:
    """The effect of synthetic rows on probabilities, and when it is undone.

    With ``when="te"`` the model learns D', and predictions are converted to D. With
    ``"tr"`` the model learns D, which the loss converts to D'.
    """

    when: When
    weight: float  # c: share of rows that are real at all parties
    offset: Tensor  # what the other rows add to each class

    def __post_init__(self) -> None:
        """Refuse a mixture that cannot be undone."""
        check_name("calibration", self.when, WHEN)
        if not self.weight > 0.0:
            raise ConfigError(
                "predictions cannot be calibrated: no row is held by all parties"
            )

    @classmethod
    def of(
        cls,
        when: When,
        labelled: float,
        complete: float,
        frequencies: Tensor,
        synthetic: Tensor | None,
    ) -> Calibration:
        """Return the calibration of a run."""
        if synthetic is None:
            weight = complete / labelled if labelled > 0.0 else 0.0
            return cls(when, weight, (1.0 - weight) * frequencies)
        offset = (labelled - complete) * frequencies + (1.0 - labelled) * synthetic
        return cls(when, complete, offset)

    def to_real(self, probabilities: Tensor) -> Tensor:
        """Return D from the probabilities that the model predicts."""
        if self.when == "tr":
            return probabilities
        return self._by_class(unmixed, probabilities)

    def to_mixture(self, probabilities: Tensor) -> Tensor:
        """Return D', which the loss compares with labels."""
        if self.when == "te":
            return probabilities
        return self._by_class(mixed, probabilities)

    def _by_class(
        self, change: Callable[[Tensor, float, Tensor], Tensor], values: Tensor
    ) -> Tensor:
        if values.dim() > 1:
            return change(values, self.weight, self.offset)
        both = torch.stack([1.0 - values, values], dim=1)
        return change(both, self.weight, self.offset)[:, 1]

    def loss(self, log_probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of D', given log D."""
        offset = self.offset.to(log_probabilities)
        scaled = log_probabilities + math.log(self.weight)
        mixture = torch.logaddexp(scaled, offset.log().expand_as(scaled))
        if labels.dim() == 1:
            return F.nll_loss(mixture, labels.long())
        return -(labels * mixture).sum(dim=1).mean()
