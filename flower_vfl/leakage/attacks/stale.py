"""The stale-gradient attack: average an example's gradients over the epochs first.

A defense that draws new noise at every step hides a label at that step only. A party
sees an example once per epoch, and noise that is independent from step to step cancels
in the mean of what it saw, while the label stays where it is.
"""

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError

from .known import as_rows, finite_norms


class StaleGradients:
    """Adds up gradients by example.

    Takes 4 bytes for each example and column, and 8 for each example.

    Parameters
    ----------
    normalize : bool (default: False)
        Divide every batch by the root mean square of its rows' norms. Gradients shrink
        while a model learns; this gives every epoch the same weight.

    Attributes
    ----------
    sums, counts : Tensor
        Sum of each example's gradients, and how often it was seen; they grow where a
        larger row number comes.

    Examples
    --------
    >>> stale = StaleGradients()
    >>> stale.add(torch.tensor([0, 2]), torch.tensor([[1.0], [4.0]]))
    >>> stale.add(torch.tensor([2, 0]), torch.tensor([[8.0], [3.0]]))
    >>> index, means = stale.means()
    >>> index.tolist(), means.tolist()
    ([0, 2], [[2.0], [6.0]])
    """

    def __init__(self, normalize: bool = False) -> None:
        self.normalize = normalize
        self.sums = torch.zeros(0, 0)
        self.counts = torch.zeros(0, dtype=torch.int64)

    def add(self, index: Tensor, gradient: Tensor) -> None:
        """Collect one batch."""
        batch = as_rows(gradient.detach().cpu())
        norms = finite_norms(batch)  # refuses what is not finite
        index = index.reshape(-1).cpu().long()
        if len(index) != len(batch):
            raise ConfigError(f"got {len(index)} row numbers for {len(batch)} rows")
        if self.normalize:
            scale = float(norms.double().square().mean().sqrt())
            batch = batch / scale if scale > 0.0 else batch
        width = self.sums.shape[1]
        if not width:
            self.sums = torch.zeros(len(self.counts), batch.shape[1])
        elif batch.shape[1] != width:
            raise ConfigError(f"got {batch.shape[1]} columns, expected {width}")
        self.sums, self.counts = grow(self.sums, index), grow(self.counts, index)
        self.sums.index_add_(0, index, batch.float())
        self.counts.index_add_(0, index, torch.ones_like(index))

    def means(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples that were seen, or `rows`, and the mean of each."""
        if not self.counts.any():
            raise ConfigError("no gradient was collected yet")
        rows = self.counts.nonzero()[:, 0] if rows is None else rows
        self.sums, self.counts = grow(self.sums, rows), grow(self.counts, rows)
        return rows, self.sums[rows] / self.counts[rows].clamp_min(1).unsqueeze(1)


def grow(table: Tensor, index: Tensor) -> Tensor:
    """Return a table that has all rows of an index; new ones are zeros."""
    missing = int(index.max()) + 1 - len(table) if len(index) else 0
    if missing <= 0:
        return table
    return torch.cat([table, table.new_zeros(missing, *table.shape[1:])])
