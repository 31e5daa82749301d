"""signSGD: Compressed Optimisation for Non-Convex Problems (Bernstein et al., 2018).

ICML 2018, https://arxiv.org/abs/1802.04434. With more than two buckets it is a baseline
(discrete SGD) of Label Inference Attacks Against Vertical Federated Learning (Fu et
al., USENIX Security 2022).
"""

from __future__ import annotations

from torch import Tensor

from flower_vfl.transform import Batch

from .base import RowTransform, require


def quantize(rows: Tensor, bins: int, bound: float) -> Tensor:
    """Clamp every entry to ±bound and round it to a multiple of Δ = 2·bound/bins.

    At most bins + 1 different values are left, none beyond ±bound. (With an odd number
    of bins ±bound is no multiple of Δ: the outermost values are then ±(bound − Δ/2).)
    """
    step = 2.0 * bound / bins
    most = bins // 2
    index = rows.clamp(-bound, bound).div_(step).round_().clamp_(-most, most)
    # The zero makes 0 of −0, which would tell the sign of an entry rounded to nothing.
    return index.mul_(step).add_(0.0)


class MultiBucket(RowTransform):
    """Entries rounded to a few values.

    Parameters
    ----------
    bins : int (default: 12)
        Number of steps between −bound and bound.
    bound : float (default: 0.03)
        Entries beyond ±bound are clamped. What suits depends on the size of the
        gradient; the published comparison has 1e-3 for click data.
    """

    def __init__(self, bins: int = 12, bound: float = 0.03) -> None:
        require(bins >= 2, "bins", "at least 2", bins)
        require(1e-30 <= bound <= 1e30, "bound", "from 1e-30 to 1e30", bound)
        self.bins = bins
        self.bound = bound

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rounded rows."""
        return quantize(rows, self.bins, self.bound)
