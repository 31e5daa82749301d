"""FLSG: A Novel Defense Strategy Against Inference Attacks in Vertical FL (Fan et al.).

IEEE Internet of Things Journal 11(2), pages 1816-1828, 2024. The predecessor of SGSub.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flower_vfl.rows import RowTransform, require
from flower_vfl.transform import Batch

from .sgsub import Original, Substitute, search


def flsg(
    rows: Tensor, generator: torch.Generator, tau: float = 0.8, max_attempts: int = 20
) -> Substitute:
    """Replace a gradient w by a sampled ŵ whose distance ‖ŵ − w‖/‖w‖ is at most τ."""
    original = Original.of(rows)
    length = float(torch.linalg.vector_norm(original.entries)) or 1.0

    def distance(candidate: Tensor) -> float:
        return float(torch.linalg.vector_norm(candidate - original.entries)) / length

    return search(original, distance, tau, max_attempts, generator)


class FLSG(RowTransform):
    """Replace the gradient by a sampled one at a small Euclidean distance.

    Candidates are sampled and sorted as in :class:`SGSub`, so the rank order of the
    entries survives here too.

    Parameters
    ----------
    tau : float (default: 0.8)
        Largest distance that is accepted, relative to the gradient's norm.
    max_attempts : int (default: 20)
        Number of attempts after which the closest candidate is taken.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import FLSG
    >>> rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    >>> batch = Batch("passive-1", step=1, seed=7)
    >>> changed = FLSG(tau=0.8)(rows, batch)
    >>> batch.metrics["flsg_distance"] <= 0.8
    True
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
