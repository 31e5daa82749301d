"""How many labels an attack that names a class for every row gets right."""

from __future__ import annotations

import math

from torch import Tensor

from .scores import direct_attack


def direct_success(gradient: Tensor, labels: Tensor) -> float:
    """Return the success of the direct attack on a batch, as LADSG tabulates it."""
    guessed = direct_attack(gradient)
    truth = labels.to(guessed).reshape(-1)
    if gradient.flatten(1).shape[1] > 2:
        return float((guessed == truth).double().mean())
    if not truth.any():
        return math.nan
    hits, wrong = int((guessed * truth).sum()), int((guessed != truth).sum())
    return 2.0 * hits / (2.0 * hits + wrong)
