"""No defense: the identity, as a baseline for comparisons."""

from __future__ import annotations

from torch import Tensor

from flower_vfl.rows import RowTransform
from flower_vfl.transform import Batch


class NoDefense(RowTransform):
    """Leave every gradient as it is.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import NoDefense
    >>> NoDefense()(torch.ones(1, 2), Batch("passive-1", step=1, seed=7))
    tensor([[1., 1.]])
    """

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows themselves."""
        return rows
