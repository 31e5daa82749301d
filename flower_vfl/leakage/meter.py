"""The leakage meter: every score attack on every batch, at the party with the labels.

It holds numbers only: what it returns and what it saves are AUCs, never labels or rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks.known import BatchLabels, attacker
from flower_vfl.leakage.attacks.registry import (
    DEFAULT_ATTACKS,
    attack_scores,
    build_attack,
    leaks,
)
from flower_vfl.objectives import Task
from flower_vfl.randomness import generator

from .auc import Pair, summarise

_REMEDY = "Look at that party's gradient, and at the settings of the leakage meter"


@dataclass
class _Series:
    """What one attack on one layer of one party measured, batch after batch."""

    steps: list[int] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    flipped: list[float] = field(default_factory=list)
    skipped: int = 0


class LeakageMeter:
    """Runs score attacks on gradients and keeps what they found.

    The value of an attack on a batch is its leak AUC. With more than two classes that
    is the mean over the classes, each against the rest. For a regression it is
    Pearson's rho of score and label, and of several scores the one of largest |rho|.
    Flipped values are max(a, 1 − a), for each class before the mean, or |rho|.
    A batch with one class only is skipped and counted.

    Parameters
    ----------
    attacks : Sequence[str] | None (default: None)
        Names of `SCORE_ATTACKS`, perhaps with parameters. None takes norm, cosine, mean
        and median, or for a regression norm, direct and spectral.
    task : {"binary", "multiclass", "regression"} (default: "binary")
        What the labels are.
    baseline : bool (default: False)
        Measure random gradients of the same shape beside every batch: what the attacks
        find where there is nothing to find. Kept as party ``"<party>/random"``.
    seed : int (default: 0)
        Of the random gradients.
    keep : bool (default: True)
        Keep every value, for :meth:`series` and :meth:`summary`.

    Examples
    --------
    >>> meter = LeakageMeter(("norm", "mean"))
    >>> gradient = torch.tensor([[0.1, 0.0], [0.2, 0.0], [0.9, 0.1], [0.7, 0.2]])
    >>> meter.measure("passive-1", gradient, torch.tensor([0, 0, 1, 1]), step=1)
    {'norm': 1.0, 'mean': 1.0}
    """

    def __init__(
        self,
        attacks: Sequence[str] | None = None,
        task: Task = "binary",
        baseline: bool = False,
        seed: int = 0,
        keep: bool = True,
    ) -> None:
        if task not in DEFAULT_ATTACKS:
            raise ConfigError(f"unknown task '{task}' of a leakage meter")
        self.attacks = DEFAULT_ATTACKS[task] if attacks is None else tuple(attacks)
        self.task: Task = task
        self.baseline = baseline
        self.seed = seed
        self.keep = keep
        self._built = [build_attack(spec, task) for spec in self.attacks]
        self._series: dict[tuple[str, str, str], _Series] = {}

    def measure(
        self,
        party: str,
        gradient: Tensor,
        labels: Tensor,
        step: int,
        clean: Tensor | None = None,
        layer: str = "cut",
        flipped: bool = False,
    ) -> dict[str, float]:
        """Attack one party's gradient and return the value of each attack.

        Parameters
        ----------
        party : str
            Name of the party that gets the gradient.
        gradient : Tensor
            What it gets, one row per example.
        labels : Tensor
            One label per row.
        step : int
            The training step.
        clean : Tensor | None (default: None)
            The gradient before the defense, where the one that the cosine attack knows
            comes from.
        layer : str (default: "cut")
            Whose gradient it is.
        flipped : bool (default: False)
            Return flipped values; both are kept.
        """
        cleans = None if clean is None else {party: clean}
        gradients = {party: gradient}
        return self.measure_all(gradients, labels, step, cleans, layer, flipped)[party]

    def measure_all(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        clean: Mapping[str, Tensor] | None = None,
        layer: str = "cut",
        flipped: bool = False,
    ) -> dict[str, dict[str, float]]:
        """Attack the gradients of several parties for the same rows.

        Parameters
        ----------
        gradients : Mapping[str, Tensor]
            What each party gets.
        labels : Tensor
            One label per row.
        step, layer, flipped
            As for :meth:`measure`.
        clean : Mapping[str, Tensor] | None (default: None)
            The gradients before the defense.

        Returns
        -------
        dict[str, dict[str, float]]
            Values by party and attack; without those that were skipped.
        """
        found = self.pairs(gradients, labels, step, clean, layer)
        return {
            party: {name: pair[flipped] for name, pair in found[party].items()}
            for party in gradients
        }

    def measure_coalition(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        clean: Mapping[str, Tensor] | None = None,
        layer: str = "cut",
        flipped: bool = False,
    ) -> dict[str, float]:
        """Attack several parties' gradients as if one attacker had them all.

        Kept as a party whose name is the members' names joined by ``+``.
        """
        name = "+".join(gradients)
        joined = _join(gradients, gradients, step)
        before = _join(clean, gradients, step) if clean else None
        return self.measure(name, joined, labels, step, before, layer, flipped)

    def pairs(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        clean: Mapping[str, Tensor] | None = None,
        layer: str = "cut",
        coalitions: Sequence[Sequence[str]] = (),
    ) -> dict[str, dict[str, Pair]]:
        """Attack parties, coalitions and random gradients; return raw and flipped."""
        clean = clean or {}
        batches = {p: (g, clean.get(p)) for p, g in gradients.items()}
        for members in coalitions:
            complete = all(member in clean for member in members)
            before = _join(clean, members, step) if complete else None
            batches["+".join(members)] = _join(gradients, members, step), before
        if self.baseline:
            for party, (gradient, _) in list(batches.items()):
                stream = generator(self.seed, "baseline", party, layer, step)
                batches[f"{party}/random"] = _random_like(gradient, stream), None
        if not batches:
            return {}
        at_fault = " and ".join(batches)
        scored = []
        try:
            read = BatchLabels.read(self.task, labels)
            for at_fault, (gradient, before) in batches.items():  # noqa: B007
                rows, known = attacker(read, gradient, before)
                scored.append((known, attack_scores(self._built, rows, known)))
            found = leaks(self._built, scored)
        except ConfigError as error:
            raise PartyError(at_fault, str(error), _REMEDY, step) from error
        return {
            party: self._keep(party, layer, step, values)
            for party, values in zip(batches, found, strict=True)
        }

    def _keep(
        self, party: str, layer: str, step: int, values: Sequence[Pair]
    ) -> dict[str, Pair]:
        """Keep what was found; leave out and count what could not be measured."""
        found = {}
        for attack, pair in zip(self.attacks, values, strict=True):
            skipped = math.isnan(pair[0])
            if not skipped:
                found[attack] = pair
            if self.keep:
                series = self._series.setdefault((party, layer, attack), _Series())
                series.skipped += skipped
                if not skipped:
                    series.steps.append(step)
                    series.raw.append(pair[0])
                    series.flipped.append(pair[1])
        return found

    def series(
        self, party: str, attack: str, layer: str = "cut", flipped: bool = False
    ) -> list[tuple[int, float]]:
        """Return what an attack found, as pairs of step and value."""
        kept = self._series.get((party, layer, attack), _Series())
        values = kept.flipped if flipped else kept.raw
        return list(zip(kept.steps, values, strict=True))

    def skipped(self, party: str, attack: str, layer: str = "cut") -> int:
        """Return how many batches an attack could not be measured on."""
        return self._series.get((party, layer, attack), _Series()).skipped

    def summary(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """Return mean, last, max and 95 % quantile by party, layer and attack.

        Keys are ``mean``, ``last``, ``max`` and ``q95``, the same with ``flipped_`` in
        front, ``batches`` and ``skipped``.
        """
        result: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
        for (party, layer, attack), kept in self._series.items():
            numbers = summarise(kept.raw)
            flipped = summarise(kept.flipped)
            numbers |= {f"flipped_{name}": value for name, value in flipped.items()}
            numbers |= {"batches": len(kept.raw), "skipped": kept.skipped}
            result.setdefault(party, {}).setdefault(layer, {})[attack] = numbers
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return all series, as numbers and tensors."""
        return {
            "series": [
                {
                    "party": party,
                    "layer": layer,
                    "attack": attack,
                    "steps": torch.tensor(kept.steps, dtype=torch.int64),
                    "raw": torch.tensor(kept.raw, dtype=torch.float64),
                    "flipped": torch.tensor(kept.flipped, dtype=torch.float64),
                    "skipped": kept.skipped,
                }
                for (party, layer, attack), kept in self._series.items()
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved series."""
        self._series = {
            (saved["party"], saved["layer"], saved["attack"]): _Series(
                saved["steps"].tolist(),
                saved["raw"].tolist(),
                saved["flipped"].tolist(),
                int(saved["skipped"]),
            )
            for saved in state["series"]
        }


def _random_like(gradient: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(gradient.shape, generator=generator, device=generator.device)
    return noise.to(gradient.device)


def _join(gradients: Mapping[str, Tensor], members: Iterable[str], step: int) -> Tensor:
    """Put the rows of several parties side by side."""
    parts = [gradients[name].reshape(len(gradients[name]), -1) for name in members]
    if len({len(part) for part in parts}) != 1:
        sizes = ", ".join(str(len(part)) for part in parts)
        problem = f"its members' gradients have {sizes} rows"
        raise PartyError("+".join(members), problem, _REMEDY, step)
    return torch.cat(parts, dim=1)
