"""The four usual attacks on the gradients of several parties, in one pass.

One by one, most of the time of an attack is that of the calls
(``benchmarks/meter_cost.py``).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flower_vfl.leakage.auc import Pair, pairs_in_order
from flower_vfl.rows import LARGEST, SMALLEST

from .cosine import CosineAttack, cosines
from .known import SMALL, Array, GroupedLabels, clustered, example, to_numpy
from .mean import MeanAttack, MedianAttack, merge_ties, nearness
from .norm import norm_scores
from .registry import ScoreAttack

_ENTRIES = 2**18  # numbers of a stack, for the cache


class PartyBatch(NamedTuple):
    """What a party gets, also before a defense, and what it sent."""

    party: str
    gradient: Tensor
    clean: Tensor | None = None
    embedding: Tensor | None = None
    kind: str = ""  # of the metric


def stacked_leaks(
    attacks: Sequence[ScoreAttack], labels: GroupedLabels, batches: Sequence[PartyBatch]
) -> dict[int, list[Pair]]:
    """Return the leaks of the batches that can be stacked, by their position."""
    unfit = labels.task != "binary" or labels.constant
    if unfit or not all(map(_stacks, attacks)):
        return {}
    shapes: dict[object, list[int]] = {}
    for number, (_, gradient, clean, embedding, _) in enumerate(batches):
        rows = gradient.ndim > 1 and len(gradient) == len(labels.labels)
        alike = clean is None or clean.shape == gradient.shape
        alone = embedding is None and gradient.numel() > 0
        if rows and alike and alone and gradient.is_floating_point():
            kind = gradient.shape, gradient.dtype, gradient.device
            shapes.setdefault(kind, []).append(number)
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
    if isinstance(attack, MeanAttack):
        by_class = not isinstance(attack, MedianAttack) or attack.split == "class"
        return by_class and not (attack.hard or attack.held_out or attack.sums)
    norm = isinstance(attack, partial) and attack.func is norm_scores
    return norm or isinstance(attack, CosineAttack)


def _leaks(
    attacks: Sequence[ScoreAttack], labels: GroupedLabels, batches: Sequence[PartyBatch]
) -> list[list[Pair]]:
    """Return the leaks of each party, or none if one of them needs a closer look.

    Then the parties are measured one by one, which names one that is not finite, and
    finds the precision that each of them needs.
    """
    matrix = _side_by_side([batch.gradient for batch in batches])
    rows = matrix.view(len(matrix), len(batches), -1)
    array = to_numpy(rows)
    norms = np.sqrt(np.einsum("rpc,rpc->pr", array, array))
    power = 1 if norms.dtype == np.float32 else 10  # of the range of numbers
    if not (norms.min() >= SMALLEST**power and norms.max() <= LARGEST**power):
        return []
    if norms.dtype == np.float32 and clustered(rows.transpose(0, 1), norms):
        return []
    scores = np.empty((len(norms), len(attacks), len(rows)), norms.dtype)
    scores[:] = norms[:, None]  # those of the norm attack
    cosine = [i for i, attack in enumerate(attacks) if isinstance(attack, CosineAttack)]
    center = [i for i, attack in enumerate(attacks) if isinstance(attack, MeanAttack)]
    vectors: list[Array] = []
    examples: list[int] = []
    if cosine:
        examples, known = _examples(labels.groups[1], batches, norms.dtype)
        vectors.append(known)
    for attack in attacks:
        if isinstance(attack, MeanAttack):
            vectors.append(attack.centers(matrix, labels.groups, len(batches)))
    if vectors:
        stack = np.concatenate(vectors).reshape(-1, *rows.shape[1:]).swapaxes(0, 1)
        products = to_numpy(torch.from_numpy(stack).to(rows) @ rows.permute(1, 2, 0))
        lengths = np.square(stack).sum(axis=-1, keepdims=True)
    if cosine:
        angles = cosines(products[:, :1], lengths[:, :1], norms[:, None])
        angles[range(len(norms)), 0, examples] = -2.0  # below all: wins no pair
        scores[:, cosine] = angles
    if center:
        first, shape = bool(cosine), (len(norms), len(center), 2, -1)
        along, sizes = (each[:, first:].reshape(shape) for each in (products, lengths))
        near = nearness(along, sizes, norms[:, None, None])
        scores[:, center] = merge_ties(near, 2)
    if not math.isfinite(scores.sum()):
        return []
    return _pairs(labels, scores, cosine)


def _examples(
    group: Array, batches: Sequence[PartyBatch], dtype: np.dtype[Any]
) -> tuple[list[int], Array]:
    """Return the known row of each party, and these clean gradients side by side."""
    examples, known = [], []
    for batch in batches:
        clean = batch.gradient if batch.clean is None else batch.clean
        half = clean.dtype == torch.bfloat16  # which numpy lacks
        rows = to_numpy(clean.detach().float() if half else clean.detach())
        examples.append(example(rows, group))
        known.append(rows[examples[-1]].reshape(1, -1))
    return examples, np.concatenate(known, axis=1, dtype=dtype)


def _pairs(
    labels: GroupedLabels, scores: Array, cosine: Sequence[int]
) -> list[list[Pair]]:
    """Return raw and flipped leaks of scores, (parties, attacks, rows)."""
    zeros, ones = map(len, labels.groups)
    positive = np.zeros(scores.shape[-1], np.bool_)
    positive[labels.groups[1]] = True
    won = pairs_in_order(scores.reshape(-1, len(positive)), positive)
    pairs = np.full(scores.shape[1], zeros * ones)
    pairs[cosine] -= zeros  # the known row does not count
    with np.errstate(invalid="ignore"):
        aucs = won.reshape(scores.shape[:-1]) / pairs
    return [[(auc, max(auc, 1.0 - auc)) for auc in own] for own in aucs.tolist()]


def _side_by_side(gradients: Sequence[Tensor]) -> Tensor:
    """Return gradients as one matrix in a safe precision, if possible without a copy.

    The gradients of concatenated embeddings are parts of one matrix.
    """
    flat = [gradient.detach().flatten(1) for gradient in gradients]
    first, width = flat[0], flat[0].shape[1]
    whole, stride = first.untyped_storage().data_ptr(), (first.stride(0), 1)
    if all(
        each.untyped_storage().data_ptr() == whole
        and each.stride() == stride
        and each.storage_offset() == first.storage_offset() + number * width
        for number, each in enumerate(flat)
    ):
        matrix = first.as_strided((len(first), len(flat) * width), stride)
    else:
        matrix = torch.cat(flat, dim=1)
    wide = matrix.double() if first.numel() <= SMALL else matrix
    return wide.float() if wide.itemsize < 4 else wide
