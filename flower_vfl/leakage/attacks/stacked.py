"""The four usual attacks on the gradients of several parties and steps, in one pass.

One by one, most of the time of an attack is that of the calls
(``benchmarks/meter_cost.py``).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flower_vfl.leakage.auc import Pair, pairs_in_order
from flower_vfl.rows import LARGEST, SMALLEST

from .cosine import CosineAttack, cosines
from .known import SMALL, Array, GroupedLabels, clustered, example, grain, to_numpy
from .mean import MeanAttack, MedianAttack, class_means, nearness
from .norm import norm_scores
from .registry import ScoreAttack

_ENTRIES, _SCORES = 2**18, 2**14  # numbers of gradients, and of rows, at once


class PartyBatch(NamedTuple):
    """What a party gets, also before a defense, and what it sent."""

    party: str
    gradient: Tensor
    clean: Tensor | None = None
    embedding: Tensor | None = None
    kind: str = ""  # of the metric


def stacked_leaks(
    attacks: Sequence[ScoreAttack],
    steps: Sequence[tuple[GroupedLabels, Sequence[PartyBatch]]],
) -> dict[tuple[int, int], list[Pair]]:
    """Return the leaks of the batches that can be stacked, by step and position.

    Gradients that are not finite or need more precision are left out; the caller
    measures them one by one.
    """
    found: dict[tuple[int, int], list[Pair]] = {}
    waiting: dict[object, _Stack] = {}
    for number, (labels, batches) in enumerate(steps):
        for part in _parts(labels, batches) if all(map(_stacks, attacks)) else ():
            products = _compare(attacks, labels, [batches[each] for each in part])
            kind = products.norms.dtype, products.norms.shape, products.vectors.shape
            stack = waiting.setdefault(kind, _Stack([], []))
            stack.where.extend((number, each) for each in part)
            stack.products.append(products)
            if len(stack.where) * len(labels.labels) >= _SCORES:
                found |= waiting.pop(kind).leaks(attacks)
    for stack in waiting.values():
        found |= stack.leaks(attacks)
    return found


def _parts(
    labels: GroupedLabels, batches: Sequence[PartyBatch]
) -> Iterator[Sequence[int]]:
    """Return the numbers of batches that fit together."""
    if labels.task != "binary" or labels.constant:
        return
    shapes: dict[object, list[int]] = {}
    for number, (_, gradient, clean, embedding, _) in enumerate(batches):
        rows = gradient.ndim > 1 and len(gradient) == len(labels.labels)
        alike = clean is None or clean.shape == gradient.shape
        alone = embedding is None and gradient.numel() > 0
        if rows and alike and alone and gradient.is_floating_point():
            kind = gradient.shape, gradient.dtype, gradient.device
            shapes.setdefault(kind, []).append(number)
    for numbers in shapes.values():
        size = max(1, _ENTRIES // batches[numbers[0]].gradient.numel())
        yield from (numbers[i : i + size] for i in range(0, len(numbers), size))


def _stacks(attack: ScoreAttack) -> bool:
    """Say whether an attack takes stacked gradients."""
    if isinstance(attack, MeanAttack):
        by_class = not isinstance(attack, MedianAttack) or attack.split == "class"
        return by_class and not (attack.hard or attack.sums)
    norm = isinstance(attack, partial) and attack.func is norm_scores
    return norm or isinstance(attack, CosineAttack)


class _Products(NamedTuple):
    """What the scores of some parties' rows follow from."""

    norms: Array  # (rows, parties)
    vectors: Array  # known row, means and other centers of the classes, (_, parties, _)
    products: Array  # of these with all rows
    examples: list[int]  # the known rows
    labels: Array


def _compare(
    attacks: Sequence[ScoreAttack], labels: GroupedLabels, batches: Sequence[PartyBatch]
) -> _Products:
    """Compare gradients with what attackers know."""
    matrix = _side_by_side([batch.gradient for batch in batches])
    rows = matrix.view(len(matrix), len(batches), -1)
    norms = to_numpy(torch.linalg.vector_norm(rows, dim=2))
    examples, known = _examples(labels.groups[1], batches, matrix)
    found = [known[:0]]  # norms are enough
    if any(isinstance(each, CosineAttack | MeanAttack) for each in attacks):
        found = [known, class_means(matrix, labels.groups)]
    for attack in attacks:
        if isinstance(attack, MeanAttack) and attack != MeanAttack():
            for part in attack.parts(labels.groups):
                found.append(attack.centers(matrix, part, len(batches)))
    vectors = np.concatenate(found).reshape(-1, *rows.shape[1:])
    stack = torch.from_numpy(vectors).to(rows).transpose(0, 1)
    products = to_numpy(stack @ rows.permute(1, 2, 0))
    return _Products(norms, vectors, products, examples, to_numpy(labels.labels))


class _Stack(NamedTuple):
    """Gradients of any steps whose scores are computed at once."""

    where: list[tuple[int, int]]
    products: list[_Products]

    @np.errstate(all="ignore")  # of gradients that need a closer look
    def leaks(
        self, attacks: Sequence[ScoreAttack]
    ) -> dict[tuple[int, int], list[Pair]]:
        """Return raw and flipped leaks by step and position."""
        norms = np.concatenate([part.norms.T for part in self.products])
        vectors = np.concatenate([part.vectors for part in self.products], axis=1)
        products = np.concatenate([part.products for part in self.products])
        examples = [each for part in self.products for each in part.examples]
        labels = np.stack([part.labels for part in self.products])
        positive = np.repeat(labels == 1, self.products[0].norms.shape[1], axis=0)
        ones = np.count_nonzero(positive, axis=1)[:, None]
        zeros = positive.shape[1] - ones

        single = norms.dtype == np.float32
        power = 1 if single else 10  # of the range of numbers
        sound = norms.min(axis=1) >= SMALLEST**power
        sound &= norms.max(axis=1) <= LARGEST**power
        sound &= np.isfinite(products.sum(axis=-1)).all(axis=-1)
        if single and len(vectors):
            means = (zeros * vectors[1] + ones * vectors[2]) / positive.shape[1]
            sound &= ~clustered(norms, means)

        keys = _keys(attacks, norms, vectors, products, examples, positive)
        won = pairs_in_order(keys, positive[:, None])
        knows = [isinstance(attack, CosineAttack) for attack in attacks]
        aucs = won / (zeros * (ones - knows))  # the known row does not count
        return {
            where: [(auc, max(auc, 1.0 - auc)) for auc in own]
            for where, own, whole in zip(self.where, aucs.tolist(), sound, strict=True)
            if whole
        }


def _keys(
    attacks: Sequence[ScoreAttack],
    norms: Array,
    vectors: Array,
    products: Array,
    examples: Sequence[int],
    positive: Array,
) -> Array:
    """Return even integers in the order of each attack's scores."""
    kind = np.uint32 if norms.dtype == np.float32 else np.uint64
    keys = np.empty((len(norms), len(attacks), norms.shape[1]), kind)
    keys[:] = norms.view(kind)[:, None]  # the order of their bits
    unit = grain(1.0, norms.dtype)

    def ranks(scores: Array, part: Array) -> Array:
        scores /= part
        np.rint(scores, out=scores)
        scores += 2.0 / unit  # from -1 / unit to 1 / unit before
        return scores

    if len(vectors):
        lengths = np.einsum("vpc,vpc->pv", vectors, vectors)[..., None]
        angles = ranks(cosines(products[:, 0], lengths[:, 0], norms), unit)
        angles[range(len(norms)), examples] = 0.0  # below all: wins no pair
        keys[:, [isinstance(a, CosineAttack) for a in attacks]] = angles[:, None]
    centers = [a for a in attacks if isinstance(a, MeanAttack)]
    if centers:
        shape = len(norms), -1, 2, norms.shape[1]
        along = products[:, 1:].reshape(shape)
        sizes = lengths[:, 1:].reshape(*shape[:3], 1)
        pairs = nearness(along, sizes, norms[:, None, None])
        others = iter(pairs.swapaxes(0, 1)[1:])
        near = np.empty((len(norms), len(centers), norms.shape[1]), norms.dtype)
        for number, attack in enumerate(centers):
            near[:, number] = pairs[:, 0] if attack == MeanAttack() else next(others)
            if attack.held_out:
                first = (
                    np.where(positive, positive.cumsum(1), (~positive).cumsum(1)) & 1
                )
                np.copyto(near[:, number], next(others), where=first == 1)
        largest = np.maximum(near.max(axis=-1), -near.min(axis=-1))[..., None]
        found = ranks(near, grain(largest, near.dtype))
        keys[:, [isinstance(a, MeanAttack) for a in attacks]] = found
    keys <<= 1
    return keys


def _examples(
    group: Array, batches: Sequence[PartyBatch], matrix: Tensor
) -> tuple[list[int], Array]:
    """Return the known row of each party, and these clean gradients side by side."""
    if all(batch.clean is None or batch.clean is batch.gradient for batch in batches):
        first = int(group[0])  # no row is all zeros
        return [first] * len(batches), to_numpy(matrix[first : first + 1])
    examples, known = [], []
    for batch in batches:
        clean = batch.gradient if batch.clean is None else batch.clean
        half = clean.dtype == torch.bfloat16  # which numpy lacks
        rows = to_numpy(clean.detach().float() if half else clean.detach())
        examples.append(example(rows, group))
        known.append(rows[examples[-1]].reshape(1, -1))
    joined = torch.from_numpy(np.concatenate(known, axis=1))
    return examples, to_numpy(joined.to(matrix.dtype))


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
