"""The stale-gradient attack: average an example's gradients over the epochs first.

A defense that draws new noise at every step hides a label at that step only. A party
sees an example once per epoch, and noise that is independent from step to step cancels
in the mean of what it saw, while the label stays where it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, require
from flower_vfl.objectives import Task

from .known import GroupedLabels, as_rows, attacker, finite_norms
from .registry import attack_scores, build_attack, leaks


class StaleGradients:
    """Adds up gradients by example and attacks their means.

    Parameters
    ----------
    rows : int
        Number of examples.
    normalize : bool (default: False)
        Divide every batch by the root mean square of its rows' norms. Gradients shrink
        while a model learns; this gives every epoch the same weight.
    task : {"binary", "multiclass", "regression"} (default: "binary")
        What the labels are.

    Attributes
    ----------
    counts : Tensor
        How often each example was seen.

    Examples
    --------
    >>> stale = StaleGradients(rows=3)
    >>> stale.add(torch.tensor([0, 2]), torch.tensor([[1.0], [4.0]]))
    >>> stale.add(torch.tensor([2, 0]), torch.tensor([[8.0], [3.0]]))
    >>> index, means = stale.means()
    >>> index.tolist(), means.tolist()
    ([0, 2], [[2.0], [6.0]])
    >>> stale.leak(["norm"], torch.tensor([0, 0, 1]))
    {'norm': 1.0}
    """

    def __init__(
        self, rows: int, normalize: bool = False, task: Task = "binary"
    ) -> None:
        require(rows >= 1, "rows", "a number from 1", rows)
        self.rows = rows
        self.normalize = normalize
        self.task: Task = task
        self._sums: Tensor | None = None
        self.counts = torch.zeros(rows, dtype=torch.int64)

    def add(self, index: Tensor, gradient: Tensor) -> None:
        """Collect one batch."""
        batch = as_rows(gradient)
        norms = finite_norms(batch)  # refuses what is not finite
        index = index.reshape(-1).to(batch.device).long()
        if len(index) != len(batch):
            raise ConfigError(f"got {len(index)} row numbers for {len(batch)} rows")
        if self.normalize:
            scale = float(norms.double().square().mean().sqrt())
            batch = batch / scale if scale > 0.0 else batch
        if self._sums is None:
            exact = gradient if gradient.dtype == torch.float64 else gradient.float()
            self._sums = exact.new_zeros(self.rows, batch.shape[1])
            self.counts = self.counts.to(batch.device)
        if batch.shape[1] != self._sums.shape[1]:
            raise ConfigError(
                f"got {batch.shape[1]} columns, before it were {self._sums.shape[1]}"
            )
        self._sums.index_add_(0, index, batch.to(self._sums.dtype))
        self.counts.index_add_(0, index, torch.ones_like(index))

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the examples that were seen, and the mean gradient of each."""
        if self._sums is None:
            raise ConfigError("no gradient was collected yet")
        seen = self.counts.nonzero()[:, 0]
        return seen, self._sums[seen] / self.counts[seen].unsqueeze(1)

    def leak(
        self, attacks: Sequence[str], labels: Tensor, flipped: bool = False
    ) -> dict[str, float]:
        """Return what each attack finds in the mean gradients."""
        index, means = self.means()
        if len(labels) != self.rows:
            raise ConfigError(f"got {len(labels)} labels for {self.rows} examples")
        seen = labels.reshape(-1).to(means.device)[index]
        rows, known = attacker(GroupedLabels.read(self.task, seen), means)
        built = [build_attack(name, self.task) for name in attacks]
        found = leaks(built, [(known, attack_scores(built, rows, known))])[0]
        return {name: pair[flipped] for name, pair in zip(attacks, found, strict=True)}
