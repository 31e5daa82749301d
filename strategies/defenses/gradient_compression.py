"""Deep Gradient Compression (Lin et al., ICLR 2018).

https://arxiv.org/abs/1712.01887. A baseline of Fu et al. (USENIX Security 2022).
"""

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import require
from flower_vfl.rows import RowTransform
from flower_vfl.transform import Batch


def compress(rows: Tensor, keep: float) -> Tensor:
    """Keep the ⌈keep·n⌉ entries of largest magnitude, of equal ones the first."""
    wanted = math.ceil(Fraction(str(keep)) * rows.numel())
    sizes = rows.abs().reshape(-1)
    rank = len(sizes) - wanted
    if sizes.device.type == "cpu":  # numpy is ten times as fast
        smallest = torch.tensor(np.partition(sizes.numpy(), rank)[rank])
    else:
        smallest = sizes.kthvalue(rank + 1).values
    kept = sizes >= smallest
    surplus = int(torch.count_nonzero(kept)) - wanted
    if surplus:
        ties = torch.nonzero(sizes == smallest).squeeze(1)
        kept[ties[-surplus:]] = False
    # A product with 0 and 1 would keep the sign of an entry on its zero.
    return torch.where(kept.reshape(rows.shape), rows, torch.zeros_like(rows))


class GradientCompression(RowTransform):
    """Keep only the largest entries of the gradient.

    Parameters
    ----------
    keep : float (default: 0.5)
        Share of the entries that are kept.
    by_row : bool (default: False)
        Keep that share of every row (ours) and not of the batch as a whole, where the
        rows of a rare class have the largest entries and the others lose all.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import GradientCompression
    >>> rows = torch.tensor([[1.0, -4.0], [3.0, 2.0]])
    >>> GradientCompression(keep=0.5)(rows, Batch("passive-1", step=1, seed=7))
    tensor([[ 0., -4.],
            [ 3.,  0.]])
    """

    def __init__(self, keep: float = 0.5, by_row: bool = False) -> None:
        require(0.0 < keep <= 1.0, "keep", "above 0 and at most 1", keep)
        self.keep, self.by_row = keep, by_row

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows with all but the largest entries set to zero."""
        if not self.by_row:
            return compress(rows, self.keep)
        wanted = math.ceil(Fraction(str(self.keep)) * rows.shape[1])
        places = rows.abs().topk(wanted, dim=1).indices
        return torch.zeros_like(rows).scatter(1, places, rows.gather(1, places))
