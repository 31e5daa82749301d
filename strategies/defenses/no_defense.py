"""No defense: the identity, to compare others with."""

from __future__ import annotations

from torch import Tensor

from flower_vfl.transform import Batch

from .base import RowTransform


class NoDefense(RowTransform):
    """Leave every gradient as it is."""

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows themselves."""
        return rows
