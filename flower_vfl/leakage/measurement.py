"""From gradients to leak values: all attacks on all parties of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np
import torch
from torch import Tensor

from flower_vfl.leakage.attacks.registry import ScoreAttack

from .auc import flip, pearson_rho, roc_auc
from .kernels import Array
from .party_batch import BatchLabels, BatchView, PartyBatch

Pair = tuple[float, float]  # raw and flipped


def leakage(
    attacks: Sequence[ScoreAttack], parties: Sequence[PartyBatch]
) -> list[list[Pair]]:
    """Return the raw and the flipped value of each attack on each party.

    Not a number where an attack cannot be measured.
    """
    labels = parties[0].labels
    if labels.degenerate:
        return [[(nan, nan)] * len(attacks) for _ in parties]
    scores = score_all(attacks, parties)
    if labels.task == "regression":
        return _correlations(scores, labels)
    if labels.task == "binary":
        return _binary(attacks, scores, labels)
    return _multiclass(attacks, scores, labels)


def score_all(
    attacks: Sequence[ScoreAttack], parties: Sequence[PartyBatch]
) -> list[Array]:
    """Return the scores of each attack, P×c×B."""
    seen = BatchView(parties)
    known = [attack.directions(seen) for attack in attacks]
    sizes = [len(own[0]) if own else 0 for own in known]
    lengths, products = _products(seen, [own for own in known if own])
    if _unsettled(attacks, sizes, seen, lengths):
        return score_all(attacks, parties)
    scores: list[Array] = []
    start = 0
    while len(scores) < len(attacks):
        first = len(scores)
        attack, stop = attacks[first], first + 1
        while stop < len(attacks) and attack.alike(attacks[stop]):
            stop += 1
        shape = len(parties), stop - first, sizes[first]
        part = slice(start, start + shape[1] * shape[2])
        own = products[:, part].reshape(*shape, products.shape[2])
        found = attack.scores(seen, lengths[:, part].reshape(shape), own)
        scores += [found[:, i] for i in range(shape[1])]
        start = part.stop
    return scores


def _products(seen: BatchView, known: Sequence[list[Array]]) -> tuple[Array, Array]:
    """Return norms of all directions, P×k, and their products with the rows, P×k×B."""
    if not known:
        empty = np.empty((len(seen.parties), 0, seen.norms.shape[3]))
        return empty[:, :, 0], empty
    lengths, products = [], []
    # A product with a multiple of four rows is the fastest: twice as fast as with 3.
    rest = -sum(len(own[0]) for own in known) % 4
    for number, party in enumerate(seen.parties):
        rows = party.rows
        fill = np.zeros((rest, rows.shape[1]), dtype=np.float32)
        joined = torch.from_numpy(np.concatenate([*(k[number] for k in known), fill]))
        joined = joined.to(rows)
        own = joined.cpu().numpy()
        lengths.append(np.sqrt(np.einsum("kd,kd->k", own, own)))
        products.append((joined @ rows.T).cpu().numpy())
    return np.stack(lengths), np.stack(products)


def _unsettled(
    attacks: Sequence[ScoreAttack],
    sizes: Sequence[int],
    seen: BatchView,
    lengths: Array,
) -> bool:
    """Let the attacks look at the lengths; return whether one wants to begin anew."""
    if not any(sizes):
        return False
    anew = False
    for party, own in zip(seen.parties, lengths.tolist(), strict=True):
        square = float(np.vdot(party.norms, party.norms)) / len(party.norms)
        start = 0
        for attack, size in zip(attacks, sizes, strict=True):
            if size and attack.unsettled(party, own[start : start + size], square):
                anew = True
            start += size
    return anew


def _binary(
    attacks: Sequence[ScoreAttack], scores: Sequence[Array], labels: BatchLabels
) -> list[list[Pair]]:
    """Return the AUC of class 1, and max(a, 1 − a)."""
    ones = int(labels.sizes[1])
    joined = torch.from_numpy(np.concatenate(scores, axis=1))
    aucs = roc_auc(joined, torch.from_numpy(labels.masks[1]))
    found: list[list[Pair]] = []
    for party in aucs.tolist():
        found.append([])
        for attack, auc in zip(attacks, party, strict=True):
            if attack.knows_rows:
                # The known row has the highest score: it won against all negatives.
                auc = (auc * ones - 1.0) / (ones - 1) if ones > 1 else nan
            found[-1].append((auc, max(auc, 1.0 - auc)))
    return found


def _multiclass(
    attacks: Sequence[ScoreAttack], scores: Sequence[Array], labels: BatchLabels
) -> list[list[Pair]]:
    """Return the mean AUC of each class against the rest, and of the flipped AUCs."""
    classes = len(labels.classes)
    ranked = np.stack([_per_class(part, classes) for part in scores], axis=1)
    positive = torch.from_numpy(np.stack(labels.masks)).expand(ranked.shape)
    aucs = roc_auc(torch.from_numpy(ranked), positive)  # P×A×C
    for i, attack in enumerate(attacks):
        if attack.knows_rows:
            aucs[:, i] = _without_known(aucs[:, i], torch.from_numpy(labels.sizes))
    values = torch.stack([aucs.nanmean(dim=-1), flip(aucs).nanmean(dim=-1)], dim=-1)
    return [[(raw, flipped) for raw, flipped in party] for party in values.tolist()]


def _per_class(scores: Array, classes: int) -> Array:
    """Return P×C×B: one score of all classes counts for each, two centers give one."""
    if classes == 2 and scores.shape[1] == 1:
        return np.concatenate([-scores, scores], axis=1)
    return np.broadcast_to(scores, (len(scores), classes, scores.shape[2]))


def _without_known(aucs: Tensor, sizes: Tensor) -> Tensor:
    """Take one known row of each class out of the AUCs of each class.

    The known positive won against all negatives and all positives won against the known
    negatives, because the scores of known rows are out of reach.
    """
    negatives, others = sizes.sum() - sizes, len(sizes) - 1
    wins = aucs * sizes * negatives - negatives - (sizes - 1.0) * others
    pairs = (sizes - 1.0) * (negatives - others)
    return torch.where(pairs > 0, wins / pairs, nan)


def _correlations(scores: Sequence[Array], labels: BatchLabels) -> list[list[Pair]]:
    """Return the rho of largest size of each attack, and its size."""
    chosen = []
    for part in scores:
        rho = pearson_rho(torch.from_numpy(part), torch.from_numpy(labels.values))
        chosen.append(rho.gather(1, rho.abs().argmax(dim=1, keepdim=True)))
    values = torch.cat(chosen, dim=1).tolist()
    return [[(rho, abs(rho)) for rho in party] for party in values]
