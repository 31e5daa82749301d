"""Leaks of several parties at once: gradients of one shape, stacked.

One by one, most of the time of an attack on a gradient is that of the calls.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flower_vfl.leakage.auc import Pair
from flower_vfl.rows import row_norms

from .cosine import CosineAttack
from .known import (
    SMALL,
    Array,
    GroupedLabels,
    Known,
    clustered,
    compare,
    to_numpy,
)
from .mean import MeanAttack, MedianAttack
from .norm import norm_scores
from .registry import ScoreAttack, binary_leaks

_ENTRIES = 2**18  # numbers of a stack, for the cache


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

    @cached_property
    def examples(self) -> list[int]:
        """Number of the row of each party whose clean gradient is known."""
        group, clean = self.groups[1], to_numpy(self.clean)
        if not clean[:, group[0]].any(axis=1).all():
            nonzero = clean[:, group].any(axis=2)
            return [int(row) for row in group[nonzero.argmax(axis=1)]]
        return [int(group[0])] * len(clean)


def stacked_leaks(
    attacks: Sequence[ScoreAttack], labels: GroupedLabels, batches: Sequence[Attacked]
) -> dict[int, list[Pair]]:
    """Return the leaks of the batches that can be stacked, by their position."""
    unfit = labels.task != "binary" or labels.constant
    if unfit or not all(map(_stacks, attacks)):
        return {}
    shapes: dict[object, list[int]] = {}
    for number, batch in enumerate(batches):
        gradient, clean = batch.gradient, batch.clean
        rows = gradient.ndim > 1 and len(gradient) == len(labels.labels)
        alike = clean is None or clean.shape == gradient.shape
        alone = batch.embedding is None and gradient.numel() > 0
        if rows and alike and alone and gradient.is_floating_point():
            kind = gradient.shape, gradient.dtype, gradient.device
            own = clean is None or clean is gradient
            shapes.setdefault((*kind, own), []).append(number)
    found: dict[int, list[Pair]] = {}
    for numbers in shapes.values():
        size = max(1, _ENTRIES // batches[numbers[0]].gradient.numel())
        for start in range(0, len(numbers), size):
            part = numbers[start : start + size]
            leaks = _leaks(attacks, labels, [batches[number] for number in part])
            found |= dict(zip(part, leaks, strict=False))  # none if one by one
    return found


def _stacks(attack: ScoreAttack) -> bool:
    """Say whether an attack takes stacked gradients."""
    if isinstance(attack, MedianAttack) and attack.split != "class":
        return False
    if isinstance(attack, MeanAttack):
        return not attack.sums
    norm = isinstance(attack, partial) and attack.func is norm_scores
    return norm or isinstance(attack, CosineAttack)


def _leaks(
    attacks: Sequence[ScoreAttack], labels: GroupedLabels, batches: Sequence[Attacked]
) -> list[list[Pair]]:
    """Return the leaks of each party, or none if one of them needs a closer look.

    Then the parties are measured one by one, which names one that is not finite, and
    finds the precision that each of them needs.
    """
    rows = _stack([batch.gradient for batch in batches])
    before = [each.gradient if each.clean is None else each.clean for each in batches]
    clean = rows if before[0] is batches[0].gradient else _stack(before)
    norms = row_norms(rows.transpose(0, 1)).T.contiguous()  # as in memory
    if norms.dtype != rows.dtype or not math.isfinite(to_numpy(norms).sum()):
        return []
    if norms.dtype == torch.float32 and clustered(rows, to_numpy(norms)):
        return []
    given = labels.task, labels.labels.to(rows.device), labels.classes, labels.groups
    known = _Stacked(*given, norms, clean)
    scores = _scores(attacks, rows, known)
    finite = math.isfinite(scores.sum())
    return binary_leaks(attacks, scores, known) if finite else []


def _scores(attacks: Sequence[ScoreAttack], rows: Tensor, known: Known) -> Array:
    """Return the scores of attacks on stacked rows, (parties, attacks, rows).

    One product compares the rows with the vectors of all attacks, and attacks of one
    formula are scored together.
    """
    norms = to_numpy(known.norms)
    scores = np.empty((len(norms), len(attacks), norms.shape[1]), norms.dtype)
    formulas: dict[object, list[tuple[int, CosineAttack | MeanAttack]]] = {}
    for number, attack in enumerate(attacks):
        if isinstance(attack, CosineAttack):
            formulas.setdefault("cosine", []).append((number, attack))
        elif isinstance(attack, MeanAttack):
            formula = attack.hard, attack.held_out
            formulas.setdefault(formula, []).append((number, attack))
        else:
            scores[:, number] = norms
    groups = list(formulas.values())
    vectors = [attack.vectors(rows, known) for group in groups for _, attack in group]
    if vectors:
        compared = compare(rows, known.norms, np.concatenate(vectors, axis=1))
    start = 0
    for group in groups:
        stop = start + sum(len(each[0]) for each in vectors[: len(group)])
        part = compared.part(start, stop, len(group))
        scores[:, [number for number, _ in group]] = group[0][1].score(part, known)
        start, vectors = stop, vectors[len(group) :]
    return scores


def _stack(gradients: Sequence[Tensor]) -> Tensor:
    """Return gradients as rows in a safe precision, (parties, rows, width)."""
    flat = [gradient.detach().flatten(1) for gradient in gradients]
    small = flat[0].numel() <= SMALL
    stacked = None if small else _view(flat)
    if stacked is None:
        stacked = torch.stack(flat, dim=1).transpose(0, 1)
    wide = stacked.double() if small else stacked
    return wide.float() if wide.itemsize < 4 else wide


def _view(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return parts of one tensor as a stack without a copy, if there is a way.

    The gradients of concatenated embeddings are such parts, and those of a sum.
    """
    first, places = gradients[0], [each.data_ptr() for each in gradients]
    steps = {b - a for a, b in pairwise(places)} or {0}
    whole = first.untyped_storage().data_ptr()
    if len(steps) > 1 or min(steps) < 0:
        return None
    if any(
        each.untyped_storage().data_ptr() != whole or each.stride() != first.stride()
        for each in gradients
    ):
        return None
    return first.as_strided(
        (len(gradients), *first.shape), (min(steps) // first.itemsize, *first.stride())
    )
