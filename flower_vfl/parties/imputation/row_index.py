"""The aligned rows, which of them a party holds, and what to do about the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flower_vfl.alignment import AlignedIds
from flower_vfl.errors import ConfigError


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The aligned rows, and which of them a party holds.

    Parameters
    ----------
    local : Tensor
        For each aligned row the party's own row (int64), -1 where it holds none.
    shares : Mapping[str, float] (default: empty)
        Share of the aligned rows that each party holds.
    common : float | None (default: None)
        Share of the aligned rows that all parties hold, if it is known.

    Examples
    --------
    >>> rows = RowIndex(torch.tensor([2, -1, 0, 1]))
    >>> rows.rows, rows.held.tolist()
    (4, [True, False, True, True])
    """

    local: Tensor
    shares: Mapping[str, float] = field(default_factory=dict)
    common: float | None = None

    def __post_init__(self) -> None:
        if self.local.dim() != 1 or self.local.dtype != torch.int64:
            raise ConfigError("a row index needs one int64 number per aligned row")
        own = self.local[self.local >= 0]
        if len(torch.unique(own)) != len(own):
            raise ConfigError("a row index maps two aligned rows to one own row")

    @property
    def rows(self) -> int:
        """Number of aligned rows."""
        return len(self.local)

    @property
    def held(self) -> Tensor:
        """Whether the party holds each aligned row."""
        return self.local >= 0

    @classmethod
    def from_aligned_ids(cls, aligned: AlignedIds) -> RowIndex:
        """Return the row index of a party after an alignment; dummies are not held."""
        size = len(aligned.universe)
        local = torch.full((size,), -1, dtype=torch.int64)
        positions = torch.from_numpy(aligned.positions)
        own = torch.nonzero(positions >= 0).flatten()
        local[positions[own]] = own
        dummies = len(aligned.dummies)
        shares = {
            name: min(1.0, (count - dummies) / size) if size else 1.0
            for name, count in aligned.counts.items()
        }
        if len(shares) != 2 or not size:
            return cls(local, shares)
        # Two parties share half of their dummies on average: see alignment.ids.
        nobody = 1.5 * dummies / size
        return cls(local, shares, max(0.0, sum(shares.values()) - (1.0 - nobody)))


@dataclass(frozen=True)
class Imputation:
    """Synthetic data for missing rows, where parties train on the union of ids.

    Parameters
    ----------
    features : str (default: "sampling")
        Synthetic features: ``"sampling"`` (a random real row), ``"gaussian"`` or
        ``"random"``, perhaps with parameters.
    labels : str (default: "majority")
        Synthetic labels: ``"majority"``, ``"minority"``, ``"random_pos"``,
        ``"random_pred"`` or ``"neighbors"``, perhaps with parameters.
    calibration : str (default: "")
        Where the effect of synthetic rows on probabilities is undone: ``"te"`` in
        predictions, ``"tr"`` in the loss, empty nowhere.
    secret : int | None (default: None)
        Seed of the synthetic data, for simulations; None draws one for every alignment.

    Examples
    --------
    >>> from flower_vfl import Imputation
    >>> Imputation(labels="random_pred:samples=3", calibration="te").features
    'sampling'
    """

    features: str = "sampling"
    labels: str = "majority"
    calibration: str = ""
    secret: int | None = None
