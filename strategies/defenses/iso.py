"""Label Leakage and Protection in Two-party Split Learning (Li et al., ICLR 2022).

https://arxiv.org/abs/2102.08504. The isotropic Gaussian baseline.
"""

import math

import torch
from torch import Tensor

from flower_vfl.errors import require
from flower_vfl.randomness import Noise
from flower_vfl.rows import AdjustableTransform, row_norms
from flower_vfl.transform import Batch


def iso(rows: Tensor, t: float, stream: Noise) -> Tensor:
    """Add N(0, t/d · max‖g‖² · I) to every row."""
    limit = torch.finfo(rows.dtype).max / 16  # no number drawn is that large
    largest = min(float(row_norms(rows).max()), limit)
    scale = min(math.sqrt(t / rows.shape[1]) * largest, limit)
    return stream.normal(rows.shape, rows.dtype).to(rows.device).mul_(scale).add_(rows)


class Iso(AdjustableTransform):
    """Add isotropic Gaussian noise, relative to the largest row of the batch.

    Parameters
    ----------
    t : float (default: 1.0)
        Ratio of the noise's expected squared norm to the largest row's.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import Iso
    >>> rows = torch.ones(10_000, 4)
    >>> noise = Iso(t=2.0)(rows, Batch("passive-1", step=1, seed=7)) - rows
    >>> print(f"{noise.square().sum(dim=1).mean() / rows[0].square().sum():.1f}")
    2.0
    """

    def __init__(self, t: float = 1.0) -> None:
        require(0.0 <= t < math.inf, "t", "a number from 0", t)
        self.t = t

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows with noise."""
        return iso(rows, self.t * self.raised, batch.noise())
