"""The stale-gradient attack: average an example's gradients over the epochs first.

A defense that draws new noise at every step hides a label at that step only. A party
sees an example once per epoch, and noise that is independent from step to step cancels
in the mean of what it saw, while the label stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task

from .known import BatchLabels, Known, attacker
from .registry import attack_scores, build_attack, leaks
from .rows import as_rows, finite_norms


class StaleGradients:
    """Collects gradients by example and attacks their means.

    Parameters
    ----------
    rows : int
        Number of examples.
    normalize : bool (default: False)
        Divide every batch by the root mean square of its rows' norms. Gradients shrink
        while a model learns; this gives every epoch the same weight.
    task : {"binary", "multiclass", "regression"} (default: "binary")
        What the labels are.

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
        if rows < 1:
            raise ConfigError(f"rows must be a number from 1, got {rows}")
        self.rows = rows
        self.normalize = normalize
        self.task: Task = task
        self._sums: Tensor | None = None
        self._counts = torch.zeros(rows, dtype=torch.int64)

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
            wide = gradient.dtype == torch.float64
            self._sums = torch.zeros(
                self.rows,
                batch.shape[1],
                dtype=torch.float64 if wide else torch.float32,
                device=batch.device,
            )
            self._counts = self._counts.to(batch.device)
        if batch.shape[1] != self._sums.shape[1]:
            raise ConfigError(
                f"got {batch.shape[1]} columns, before it were {self._sums.shape[1]}"
            )
        self._sums.index_add_(0, index, batch.to(self._sums.dtype))
        self._counts.index_add_(0, index, torch.ones_like(index))

    @property
    def counts(self) -> Tensor:
        """How often each example was seen."""
        return self._counts

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the examples that were seen, and the mean gradient of each."""
        if self._sums is None:
            raise ConfigError("no gradient was collected yet")
        seen = self._counts.nonzero()[:, 0]
        counts = self._counts[seen].unsqueeze(1)
        return seen, self._sums.index_select(0, seen) / counts

    def scores(self, attack: str, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples that were seen, and their scores."""
        index, rows, known = self._known(labels)
        if known.constant:
            raise ConfigError("all examples that were seen have the same label")
        return index, build_attack(attack, self.task)(rows, known)

    def leak(
        self, attacks: Sequence[str], labels: Tensor, flipped: bool = False
    ) -> dict[str, float]:
        """Return what each attack finds in the mean gradients."""
        _, rows, known = self._known(labels)
        built = [build_attack(name, self.task) for name in attacks]
        found = leaks(built, [(known, attack_scores(built, rows, known))])[0]
        return {name: pair[flipped] for name, pair in zip(attacks, found, strict=True)}

    def _known(self, labels: Tensor) -> tuple[Tensor, Tensor, Known]:
        index, means = self.means()
        if len(labels) != self.rows:
            raise ConfigError(f"got {len(labels)} labels for {self.rows} examples")
        seen = labels.reshape(-1).to(means.device)[index]
        return index, *attacker(BatchLabels.read(self.task, seen), means)

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected, as tensors."""
        return {"sums": self._sums, "counts": self._counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was collected before."""
        if len(state["counts"]) != self.rows:
            raise ConfigError(
                f"the state is of {len(state['counts'])} examples, not {self.rows}"
            )
        self._sums, self._counts = state["sums"], state["counts"]
