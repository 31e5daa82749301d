"""FLSG: A Novel Defense Strategy Against Inference Attacks in Vertical FL (Fan et al.).

IEEE Internet of Things Journal 11(2), 2024. The predecessor of SGSub.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flower_vfl.transform import Batch

from .base import RowTransform, require
from .sgsub import Original, Substitute, search


def flsg(
    rows: Tensor, generator: torch.Generator, tau: float = 0.8, max_attempts: int = 20
) -> Substitute:
    """Replace a gradient w by a sampled ŵ, accepted on the Euclidean distance alone.

    Sampled and brought into order as in SGSub. The distance is relative, ‖ŵ − w‖/‖w‖,
    so that one τ does for gradients of any size and for batches of any length.
    """
    original = Original.of(rows)
    length = float(torch.linalg.vector_norm(original.entries)) or 1.0

    def distance(candidate: Tensor) -> float:
        return float(torch.linalg.vector_norm(candidate - original.entries)) / length

    return search(original, distance, tau, max_attempts, generator)


class FLSG(RowTransform):
    """A sampled gradient in place of the real one, close to it.

    The rank order of the entries survives here as in SGSub, which says what that leaks.

    Parameters
    ----------
    tau : float (default: 0.8)
        Largest distance that is accepted, relative to the gradient's norm.
    max_attempts : int (default: 20)
        After so many the closest one seen is taken.
    """

    def __init__(self, tau: float = 0.8, max_attempts: int = 20) -> None:
        require(not math.isnan(tau), "tau", "a number", tau)
        require(max_attempts >= 1, "max_attempts", "at least 1", max_attempts)
        self.tau = tau
        self.max_attempts = max_attempts

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the substitute."""
        found = flsg(rows, batch.generator(), self.tau, self.max_attempts)
        batch.metrics["flsg_attempts"] = float(found.attempts)
        batch.metrics["flsg_distance"] = found.score
        return found.rows
