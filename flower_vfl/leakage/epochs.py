"""Attacks on all rows of an epoch: on their means so far, or on what was seen last."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.objectives import Task
from flower_vfl.records import Measurement
from flower_vfl.specs import parse_spec

from .attacks.registry import STALE
from .attacks.stale import StaleGradients, grow
from .meter import REMEDY, LeakageMeter


class EpochAttacks:
    """The attacks of a run that are measured at the end of each epoch.

    A stale attack gets the mean of each row's gradients so far. The others get what the
    party saw of each row last: its gradient, as that of a single row, and the embedding
    that it sent. Each looks at every party and coalition.
    """

    def __init__(self, attacks: Sequence[str], task: Task, baseline: bool) -> None:
        stale = [text for text in attacks if parse_spec(text)[0] == STALE]
        self._stale = LeakageMeter(stale, task, baseline)
        others = [text for text in attacks if text not in stale]
        self._latest = LeakageMeter(others, task, baseline)
        self._over_best = [a for a in attacks if parse_spec(a)[1].get("over") == "best"]
        self._best: dict[str, float] = {}
        self._labels = torch.zeros(0)
        self.parties: dict[str, StaleGradients] = {}
        self._last: dict[str, list[Tensor]] = {}  # gradient, and embedding if given

    def add(
        self,
        gradients: Mapping[str, Tensor],
        embeddings: Mapping[str, Tensor],
        labels: Tensor,
        rows: Tensor,
        step: int,
    ) -> None:
        """Collect what every party sent and gets."""
        labels, rows = labels.detach().cpu().reshape(-1), rows.cpu().long()
        self._labels = grow(self._labels.to(labels.dtype), rows)
        self._labels[rows] = labels
        for party, gradient in gradients.items():
            sums = self.parties.setdefault(party, StaleGradients(normalize=True))
            try:
                sums.add(rows, gradient)
            except ConfigError as error:
                raise PartyError(party, str(error), REMEDY, step) from error
            if self._latest.attacks:
                sent = [embeddings[party]] if party in embeddings else []
                self._keep(party, [gradient * len(rows), *sent], rows)

    def _keep(self, party: str, seen: Sequence[Tensor], rows: Tensor) -> None:
        """Put what a party saw of some rows in the place of what it saw before."""
        flat = [part.detach().cpu().float().reshape(len(rows), -1) for part in seen]
        tables = self._last.get(party) or [part[:0] for part in flat]
        self._last[party] = [grow(table, rows) for table in tables]
        for table, part in zip(self._last[party], flat, strict=True):
            table[rows] = part

    def measure(
        self, step: int, coalitions: Iterable[Sequence[str]]
    ) -> list[Measurement]:
        """Attack what was collected; a coalition has what its members saw."""
        found: list[Measurement] = []
        if not (self._stale.attacks or self._latest.attacks):
            return found
        for members in [*([party] for party in self.parties), *coalitions]:
            parts = [self.parties[member] for member in members]
            seen = [part.counts.numpy().nonzero()[0] for part in parts]
            rows = torch.from_numpy(reduce(np.intersect1d, seen))  # by all of them
            who, labels = "+".join(members), self._labels[rows]
            if self._stale.attacks:
                means = torch.cat([part.means(rows)[1] for part in parts], dim=1)
                found += self._stale.measure({who: means}, labels, step)
            if self._latest.attacks:
                joined = [
                    {who: torch.cat([table[rows] for table in tables], dim=1)}
                    for tables in zip(*(self._last[m] for m in members), strict=True)
                ]
                sent = joined[1] if len(joined) > 1 else None  # if it was given
                found += self._latest.measure(joined[0], labels, step, embeddings=sent)
        for number, each in enumerate(found):
            if each.attack in self._over_best:  # the largest value of any epoch
                best = max(each.value, self._best.get(each.name, each.value))
                self._best[each.name] = best
                found[number] = replace(each, value=best)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected."""
        parties = {name: [p.sums, p.counts] for name, p in self.parties.items()}
        known = {"labels": self._labels, "best": dict(self._best)}
        return {"parties": parties, "last": dict(self._last), **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._labels, self._best = state["labels"].clone(), dict(state["best"])
        self.parties = {name: StaleGradients(True) for name in state["parties"]}
        for name, own in self.parties.items():
            own.sums, own.counts = (part.clone() for part in state["parties"][name])
        self._last = {n: [t.clone() for t in own] for n, own in state["last"].items()}
