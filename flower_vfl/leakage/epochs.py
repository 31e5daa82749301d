"""Attacks that are measured once an epoch, on all of its rows."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.objectives import Task
from flower_vfl.records import Measurement
from flower_vfl.specs import parse_spec

from .attacks.known import GroupedLabels, attacker
from .attacks.registry import POOLED, STALE, attack_scores
from .attacks.stale import StaleGradients, grow
from .auc import roc_auc
from .meter import FLIPPED, LEAK, REMEDY, LeakageMeter


class EpochAttacks:
    """The attacks of a run that are measured at the end of each epoch.

    A stale attack gets the mean of each row's gradients so far. A pooled one scores
    each batch and has one AUC of all scores of the epoch, as in GAFM's released code.
    The others get what the party saw of each row last: its gradient, as that of a
    single row, and the embedding that it sent. Only pooled ones skip coalitions.
    """

    def __init__(self, attacks: Sequence[str], task: Task, baseline: bool) -> None:
        stale = [text for text in attacks if parse_spec(text)[0] == STALE]
        self._stale = LeakageMeter(stale, task, baseline)
        pooled = [text for text in attacks if parse_spec(text)[0] == POOLED]
        self._pooled = LeakageMeter(pooled, task)
        self._scores: dict[str, list[list[Tensor]]] = {}  # the labels last
        others = [text for text in attacks if text not in stale + pooled]
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
                if self._pooled.attacks:
                    self._score(party, gradient, labels)
            except ConfigError as error:
                raise PartyError(party, str(error), REMEDY, step) from error
            if self._latest.attacks:
                sent = [embeddings[party]] if party in embeddings else []
                self._keep(party, [gradient * len(rows), *sent], rows)

    def _score(self, party: str, gradient: Tensor, labels: Tensor) -> None:
        """Keep the scores of a batch, unless it has one class only."""
        rows, known = attacker(GroupedLabels.read(self._pooled.task, labels), gradient)
        if scores := attack_scores(self._pooled.built, rows, known):
            kept = self._scores.setdefault(party, [])
            kept.append([*(score.double().cpu() for score in scores), labels])

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
        found = self._measure_pooled(step)
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
                found[number] = each._replace(value=best)
        return found

    def _measure_pooled(self, step: int) -> list[Measurement]:
        """Return one AUC of the scores of all batches since the last call."""
        found: list[Measurement] = []
        for party, batches in self._scores.items():
            *scores, labels = (torch.cat(part) for part in zip(*batches, strict=True))
            aucs = roc_auc(torch.stack(scores), labels == 1).tolist()
            for attack, auc in zip(self._pooled.attacks, aucs, strict=True):
                found.append(Measurement(LEAK, auc, step, party, attack))
                flipped = max(auc, 1.0 - auc)
                found.append(Measurement(FLIPPED, flipped, step, party, attack))
        self._scores = {}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected."""
        parties = {name: [p.sums, p.counts] for name, p in self.parties.items()}
        known = {"labels": self._labels, "best": dict(self._best)}
        lists = {"last": dict(self._last), "scores": dict(self._scores)}
        return {"parties": parties, **lists, **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._labels, self._best = state["labels"].clone(), dict(state["best"])
        self.parties = {name: StaleGradients(True) for name in state["parties"]}
        for name, own in self.parties.items():
            own.sums, own.counts = (part.clone() for part in state["parties"][name])
        self._last = {n: [t.clone() for t in own] for n, own in state["last"].items()}
        self._scores = {
            name: [[part.clone() for part in batch] for batch in own]
            for name, own in state["scores"].items()
        }
