"""Label Leakage and Protection in Two-party Split Learning (Li et al., ICLR 2022).

https://arxiv.org/abs/2102.08504. The max-norm heuristic.
"""

import torch
from torch import Tensor

from flower_vfl.randomness import Noise
from flower_vfl.rows import RowTransform, row_norms
from flower_vfl.transform import Batch


def max_norm(rows: Tensor, stream: Noise) -> Tensor:
    """Stretch every row at random so that its expected squared norm is the largest.

    Row j becomes g_j·(1 + σ_j·ε_j) with one normal number ε_j per row and
    σ_j² = max‖g‖²/‖g_j‖² − 1. A row of zeros stays zero.
    """
    norms = row_norms(rows).double().clamp(max=torch.finfo(torch.float64).max)
    ratio = norms.max() / norms
    sigma = torch.sqrt(ratio - 1.0) * torch.sqrt(ratio + 1.0)
    sigma = sigma.nan_to_num_(0.0, posinf=0.0)
    drawn = stream.normal((len(rows),), torch.float64).to(rows.device)
    stretch = 1.0 + sigma * drawn
    if rows.dtype == torch.float64 or float(stretch.abs().max()) < 1e30:
        return rows * stretch.to(rows.dtype).unsqueeze(1)
    return (rows.double() * stretch.unsqueeze(1)).to(rows.dtype)


class MaxNorm(RowTransform):
    """Add noise along each row's own direction so that all expected norms are equal.

    The length of a row no longer reveals its label; its direction still may.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import MaxNorm
    >>> rows = torch.tensor([[1.0, 0.0], [0.0, 5.0]])
    >>> changed = MaxNorm()(rows, Batch("passive-1", step=1, seed=7))
    >>> torch.equal(changed[1], rows[1])  # the longest row needs no noise
    True
    """

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the stretched rows."""
        return max_norm(rows, batch.noise())
