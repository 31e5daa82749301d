"""Scores of several parties at once: small gradients of one shape, stacked.

One by one, most of the time of an attack on a small gradient is that of the calls.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError

from .cosine import CosineAttack
from .known import SMALL, GroupedLabels, Known, finite_norms
from .mean import MeanAttack, MedianAttack
from .norm import norm_scores
from .registry import ScoreAttack

Scored = tuple[Known, list[Tensor]]
_LEAST, _ENTRIES = 2, 2**18  # parties of a stack; numbers of a stack, for the cache


class Attacked(Protocol):
    """What a party gets: its gradient, also before a defense."""

    @property
    def gradient(self) -> Tensor:
        """One row per example."""
        ...

    @property
    def clean(self) -> Tensor | None:
        """The gradient before the defense."""
        ...

    @property
    def embedding(self) -> Tensor | None:
        """What the party sent."""
        ...


@dataclass(frozen=True)
class _Stacked(Known):
    """What the attackers of several parties know: norms and gradients are stacked."""

    parties: Sequence[Known] = ()

    @cached_property
    def examples(self) -> list[int]:
        """Number of the row of each party whose clean gradient is known."""
        return [known.examples[0] for known in self.parties]


def stacked_scores(
    attacks: Sequence[ScoreAttack], labels: GroupedLabels, batches: Sequence[Attacked]
) -> dict[int, Scored]:
    """Return the scores of the batches that can be stacked, by their position."""
    unfit = labels.task != "binary" or labels.constant or not len(labels.labels)
    if len(batches) < _LEAST or unfit or not all(map(_stacks, attacks)):
        return {}
    shapes: dict[object, list[int]] = {}
    for number, batch in enumerate(batches):
        gradient, clean = batch.gradient, batch.clean
        rows = gradient.ndim > 1 and len(gradient) == len(labels.labels)
        alike = clean is None or clean.shape == gradient.shape
        small = rows and 0 < gradient.numel() <= SMALL and batch.embedding is None
        if small and alike and gradient.is_floating_point():
            kind = gradient.shape, gradient.dtype, gradient.device, clean is gradient
            shapes.setdefault((*kind, clean is None), []).append(number)
    found: dict[int, Scored] = {}
    for numbers in shapes.values():
        size = max(1, _ENTRIES // batches[numbers[0]].gradient.numel())
        for start in range(0, len(numbers) if len(numbers) >= _LEAST else 0, size):
            part = numbers[start : start + size]
            scored = _scores(attacks, labels, [batches[number] for number in part])
            found |= dict(zip(part, scored, strict=False))  # none if not finite
    return found


def _stacks(attack: ScoreAttack) -> bool:
    """Say whether an attack takes stacked gradients."""
    if isinstance(attack, MedianAttack) and attack.split != "class":
        return False
    if isinstance(attack, MeanAttack):
        return not attack.sums
    norm = isinstance(attack, partial) and attack.func is norm_scores
    return norm or isinstance(attack, CosineAttack)


def _scores(
    attacks: Sequence[ScoreAttack], labels: GroupedLabels, batches: Sequence[Attacked]
) -> list[Scored]:
    """Return the scores of each party; none if a gradient is not finite.

    Then the parties are measured one by one, which names the one at fault.
    """
    rows = _stack([batch.gradient for batch in batches])
    clean = [each.gradient if each.clean is None else each.clean for each in batches]
    same = all(c is b.gradient for c, b in zip(clean, batches, strict=True))
    before = rows if same else _stack(clean)
    given = labels.task, labels.labels.to(rows.device), labels.classes, labels.groups
    try:
        norms = finite_norms(rows)
        pairs = zip(norms, before, strict=True)
        parties = [Known(*given, *pair) for pair in pairs]
        known = _Stacked(*given, norms, before, None, parties)
        by_attack = [attack(rows, known) for attack in attacks]
        if not all(math.isfinite(float(scores.sum())) for scores in by_attack):
            return []
    except ConfigError:
        return []
    scores = zip(*(each.unbind() for each in by_attack), strict=True)
    return [(own, list(each)) for own, each in zip(parties, scores, strict=True)]


def _stack(gradients: Sequence[Tensor]) -> Tensor:
    """Return gradients as double precision rows, (parties, rows, width)."""
    stacked = torch.stack([gradient.detach() for gradient in gradients])
    return stacked.flatten(2).double()
