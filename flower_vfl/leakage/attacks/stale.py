"""The stale-gradient attack: average an example's gradients over the epochs first.

A defense that draws new noise at every step hides a label at that step only. A party
sees an example once per epoch, and noise that is independent from step to step cancels
in the mean of what it saw, while the label stays where it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.meter import REMEDY, LeakageMeter
from flower_vfl.objectives import Task
from flower_vfl.records import Measurement
from flower_vfl.specs import parse_spec

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
            raise ConfigError(f"got {batch.shape[1]} columns, before it were {width}")
        self.sums, self.counts = _grow(self.sums, index), _grow(self.counts, index)
        self.sums.index_add_(0, index, batch.float())
        self.counts.index_add_(0, index, torch.ones_like(index))

    def means(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples that were seen, or `rows`, and the mean of each."""
        if not self.counts.any():
            raise ConfigError("no gradient was collected yet")
        rows = self.counts.nonzero()[:, 0] if rows is None else rows
        self.sums, self.counts = _grow(self.sums, rows), _grow(self.counts, rows)
        return rows, self.sums[rows] / self.counts[rows].clamp_min(1).unsqueeze(1)


def _grow(table: Tensor, index: Tensor) -> Tensor:
    """Return a table that has all rows of an index; new ones are zeros."""
    missing = int(index.max()) + 1 - len(table) if len(index) else 0
    if missing <= 0:
        return table
    return torch.cat([table, table.new_zeros(missing, *table.shape[1:])])


class StaleAttacks:
    """The stale attacks of a run, on every party and coalition."""

    def __init__(self, attacks: Sequence[str], task: Task, baseline: bool) -> None:
        self._meter = LeakageMeter(attacks, task, baseline)
        self._over_best = [a for a in attacks if parse_spec(a)[1].get("over") == "best"]
        self._best: dict[str, float] = {}
        self._labels = torch.zeros(0)
        self.parties: dict[str, StaleGradients] = {}

    def add(
        self, gradients: Mapping[str, Tensor], labels: Tensor, rows: Tensor, step: int
    ) -> None:
        """Collect what every party gets."""
        labels, rows = labels.detach().cpu().reshape(-1), rows.cpu().long()
        self._labels = _grow(self._labels.to(labels.dtype), rows)
        self._labels[rows] = labels
        for party, gradient in gradients.items():
            sums = self.parties.setdefault(party, StaleGradients(normalize=True))
            try:
                sums.add(rows, gradient)
            except ConfigError as error:
                raise PartyError(party, str(error), REMEDY, step) from error

    def measure(
        self, step: int, coalitions: Iterable[Sequence[str]]
    ) -> list[Measurement]:
        """Attack the means so far; a coalition has those of its members."""
        found: list[Measurement] = []
        if not self._meter.attacks:
            return found
        for members in [*([party] for party in self.parties), *coalitions]:
            parts = [self.parties[member] for member in members]
            seen = [part.counts.numpy().nonzero()[0] for part in parts]
            rows = torch.from_numpy(reduce(np.intersect1d, seen))  # by all of them
            means = torch.cat([part.means(rows)[1] for part in parts], dim=1)
            given = {"+".join(members): means}
            found += self._meter.measure(given, self._labels[rows], step)
        for number, each in enumerate(found):
            if each.attack in self._over_best:  # the largest value of any epoch
                best = max(each.value, self._best.get(each.name, each.value))
                self._best[each.name] = best
                found[number] = replace(each, value=best)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected."""
        parties = {name: [p.sums, p.counts] for name, p in self.parties.items()}
        return {"parties": parties, "labels": self._labels, "best": dict(self._best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._labels, self._best = state["labels"].clone(), dict(state["best"])
        self.parties = {name: StaleGradients(True) for name in state["parties"]}
        for name, own in self.parties.items():
            own.sums, own.counts = (part.clone() for part in state["parties"][name])
