"""Which of the aligned rows a party holds, after ids were aligned without dropping any.

Where ids are aligned by their union, every party trains on the rows of all parties and
stands in for what it does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flower_vfl.alignment import Alignment
from flower_vfl.errors import ConfigError


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The aligned rows, and which of them a party holds."""

    local: Tensor
    shares: Mapping[str, float] = field(default_factory=dict)
    common: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no such mapping."""
        if self.local.dim() != 1 or self.local.dtype != torch.int64:
            raise ConfigError("a row_index has one whole number for each aligned row")
        own = self.local[self.local >= 0]
        if len(torch.unique(own)) != len(own):
            raise ConfigError("two aligned rows are the same row of a party")

    @property
    def rows(self) -> int:
        """Number of aligned rows."""
        return len(self.local)

    @property
    def held(self) -> Tensor:
        """Whether the party holds each aligned row."""
        return self.local >= 0

    @classmethod
    def from_alignment(cls, alignment: Alignment) -> RowIndex:
        """Return what a party holds of the ids that were aligned; dummies are not held."""
        size = len(alignment.universe)
        local = torch.full((size,), -1, dtype=torch.int64)
        positions = torch.from_numpy(alignment.positions)
        own = torch.nonzero(positions >= 0).flatten()
        local[positions[own]] = own
        dummies = len(alignment.dummies)
        shares = {
            name: min(1.0, (count - dummies) / size) if size else 1.0
            for name, count in alignment.counts.items()
        }
        if len(shares) != 2 or not size:
            return cls(local, shares)
        # Two parties share half of their dummies on average: see alignment.padding.
        nobody = 1.5 * dummies / size
        return cls(local, shares, max(0.0, sum(shares.values()) - (1.0 - nobody)))
