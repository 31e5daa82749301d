"""signSGD: Compressed Optimisation for Non-Convex Problems (Bernstein et al., 2018).

ICML 2018, https://arxiv.org/abs/1802.04434. With more than two buckets it is a baseline
(discrete SGD) of Fu et al. (USENIX Security 2022).
"""

from torch import Tensor

from flower_vfl.errors import require
from flower_vfl.rows import RowTransform
from flower_vfl.transform import Batch


def quantize(rows: Tensor, bins: int, bound: float) -> Tensor:
    """Clamp every entry to ±bound and round it to a multiple of Δ = 2·bound/bins.

    With an odd number of bins the outermost values are ±(bound − Δ/2).
    """
    step, most = 2.0 * bound / bins, bins // 2
    index = rows.clamp(-bound, bound).div_(step).round_().clamp_(-most, most)
    # Adding 0 turns −0 into 0: its sign would reveal that of the entry.
    return index.mul_(step).add_(0.0)


class MultiBucket(RowTransform):
    """Round every entry to one of a few values.

    Parameters
    ----------
    bins : int (default: 12)
        Number of steps between −bound and bound.
    bound : float (default: 0.03)
        Entries beyond ±bound are clamped. A good value depends on the size of the
        gradient; the published comparison uses 1e-3 for click data.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import MultiBucket
    >>> rows = torch.tensor([[0.1, 0.4, 2.0]])
    >>> MultiBucket(bins=2, bound=0.5)(rows, Batch("passive-1", step=1, seed=7))
    tensor([[0.0000, 0.5000, 0.5000]])
    """

    def __init__(self, bins: int = 12, bound: float = 0.03) -> None:
        require(bins >= 2, "bins", "at least 2", bins)
        require(1e-30 <= bound <= 1e30, "bound", "from 1e-30 to 1e30", bound)
        self.bins, self.bound = bins, bound

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rounded rows."""
        return quantize(rows, self.bins, self.bound)
