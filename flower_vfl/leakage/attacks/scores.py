"""Scores of the gradient attacks, as pure functions of what the attacker sees.

A score says how strongly a row looks like a positive example. It has one number per
row, or for more than two classes one column per class.

Li et al., Label Leakage and Protection in Two-party Split Learning (norm, cosine).
https://arxiv.org/abs/2102.08504. Han et al., GAFM (mean, median). Sun et al., FLORIST,
after Tran et al., Spectral Signatures in Backdoor Attacks (spectral). Fu et al., Label
Inference Attacks Against Vertical Federated Learning (direct).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.rows import row_norms, to_rows

from .centers import CenterKind, class_centers

_PART = {torch.float32: 2.0**-17, torch.float64: 2.0**-30}  # of the largest score
_SMALL = 2**14  # entries; up to here double precision costs next to nothing


def as_rows(gradient: Tensor) -> Tensor:
    """Return a gradient of any shape as a matrix with one row per example.

    Half precision becomes single precision, and what is small double precision.
    """
    if not gradient.is_floating_point() or gradient.ndim == 0:
        raise ConfigError(
            "a gradient must have one row of floating point numbers per example, got "
            f"{gradient.dtype} of the shape {tuple(gradient.shape)}"
        )
    rows = to_rows(gradient)
    return rows.double() if rows.numel() <= _SMALL else rows


def finite_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of every row; refuse numbers that are not finite."""
    norms = row_norms(rows)
    if not torch.isfinite(norms).all() and (bad := int((~torch.isfinite(rows)).sum())):
        raise ConfigError(f"{bad} numbers of the gradient are missing or infinite")
    return norms


def norm_attack(gradient: Tensor) -> Tensor:
    """Return the length of every row: positives of a rare class have longer ones.

    Parameters
    ----------
    gradient : Tensor
        One row per example.
    """
    return finite_norms(as_rows(gradient))


def cosine_attack(gradient: Tensor, positive: Tensor) -> Tensor:
    """Return the cosine between every row and a positive example's clean gradient.

    Parameters
    ----------
    gradient : Tensor
        One row per example.
    positive : Tensor
        One row: a positive example's gradient before any defense. Or several rows, one
        for each class, for a score with one column per class.
    """
    rows = as_rows(gradient)
    known = as_rows(positive.reshape(-1, rows.shape[1])).to(rows)
    lengths = torch.outer(finite_norms(rows), finite_norms(known)).to(rows)
    cosines = rows @ known.T / torch.where(lengths > 0, lengths, 1.0)
    cosines = _round_to(cosines, _PART[cosines.dtype])
    return cosines[:, 0] if positive.shape == gradient.shape[1:] else cosines


def merge_ties(scores: Tensor) -> Tensor:
    """Round scores to a small part of the largest one, so that ties are ties.

    Rows on a line, such as those below a linear top model, have a cosine of ±1, and
    beyond the centers the difference of their distances is constant. Without this, the
    last bit would decide the order of such rows.
    """
    tiny = torch.finfo(scores.dtype).tiny * 2.0**20
    return _round_to(scores, scores.abs().amax().clamp_min(tiny) * _PART[scores.dtype])


def _round_to(scores: Tensor, unit: Tensor | float) -> Tensor:
    return (scores / unit).round_().mul_(unit)


def mean_attack(
    gradient: Tensor,
    labels: Tensor | None = None,
    centers: Tensor | None = None,
    hard: bool = False,
) -> Tensor:
    """Return how much nearer a row is to the mean of class 1 than to that of class 0.

    ‖g−μ0‖ − ‖g−μ1‖. With more than two classes, the column of class c is the distance
    to the nearest other mean less the distance to μ_c.

    Parameters
    ----------
    gradient : Tensor
        One row per example.
    labels : Tensor | None (default: None)
        Class numbers, to take the means from the rows themselves.
    centers : Tensor | None (default: None)
        The class means, one row each, if the attacker knows them already.
    hard : bool (default: False)
        Return the number of the nearest class (a tie between 0 and 1 counts as 1).
    """
    return _center_attack("mean", gradient, labels, centers, hard)


def median_attack(
    gradient: Tensor,
    labels: Tensor | None = None,
    centers: Tensor | None = None,
    hard: bool = False,
) -> Tensor:
    """Return how much nearer a row is to the median of class 1 than to that of class 0.

    As :func:`mean_attack`, with the median of every coordinate.

    Parameters
    ----------
    gradient : Tensor
        One row per example.
    labels : Tensor | None (default: None)
        Class numbers, to take the medians from the rows themselves.
    centers : Tensor | None (default: None)
        The class medians, one row each, if the attacker knows them already.
    hard : bool (default: False)
        Return the number of the nearest class (a tie between 0 and 1 counts as 1).
    """
    return _center_attack("median", gradient, labels, centers, hard)


def _center_attack(
    kind: CenterKind,
    gradient: Tensor,
    labels: Tensor | None,
    centers: Tensor | None,
    hard: bool,
) -> Tensor:
    rows = as_rows(gradient).double()
    finite_norms(rows)  # refuses what is not finite
    if centers is None:
        if labels is None:
            raise ConfigError(f"the {kind} attack needs labels or the class {kind}s")
        centers = class_centers(kind, rows, labels)
    centers = as_rows(centers).to(rows)
    distances = torch.stack([finite_norms(rows - center) for center in centers], dim=1)
    if hard:
        closer = distances[:, 1] <= distances[:, 0] if len(centers) == 2 else None
        return distances.argmin(dim=1) if closer is None else closer.long()
    if len(centers) == 2:
        return merge_ties(distances[:, 0] - distances[:, 1])
    two = distances.topk(2, dim=1, largest=False)
    own = torch.arange(len(centers), device=rows.device)
    others = torch.where(
        two.indices[:, :1] == own, two.values[:, 1:], two.values[:, :1]
    )
    return merge_ties(others - distances)


def spectral_attack(gradient: Tensor, signed: bool = False) -> Tensor:
    """Return how far every row is from the mean along the direction of most variance.

    Finds the smaller of two groups of rows, e.g. synthetic ones.

    Parameters
    ----------
    gradient : Tensor
        One row per example: gradients, or embeddings joined with labels.
    signed : bool (default: False)
        Keep on which side of the mean a row is. Two groups of the same size lie as far
        from their common mean, and only this tells them apart.
    """
    rows = as_rows(gradient)
    finite_norms(rows)
    distances = (rows - rows.mean(dim=0)) @ top_direction(rows)
    return distances if signed else distances.abs()


def top_direction(rows: Tensor) -> Tensor:
    """Return the first right singular vector of the centered rows.

    Its largest entry is positive, so that it does not depend on the solver.
    """
    centered = rows.double() - rows.double().mean(dim=0)
    centered = centered / centered.abs().amax().clamp_min(1e-300)
    count, width = centered.shape
    direction: Tensor
    if width <= count:
        direction = torch.linalg.eigh(centered.T @ centered)[1][:, -1]
    else:
        direction = centered.T @ torch.linalg.eigh(centered @ centered.T)[1][:, -1]
        direction = direction / direction.norm().clamp_min(1e-300)
    largest = direction.gather(0, direction.abs().argmax(dim=0, keepdim=True))
    return (direction * torch.where(largest < 0, -1.0, 1.0)).to(rows.dtype)


def direct_attack(gradient: Tensor, hard: bool = True) -> Tensor:
    """Read the labels off the gradient of summed logits, p − y.

    Parameters
    ----------
    gradient : Tensor
        One column for a binary task, one per class otherwise.
    hard : bool (default: True)
        Return class numbers: 1 where the one column is negative, or the index of the
        smallest entry. False returns −g as the score.
    """
    rows = as_rows(gradient)
    finite_norms(rows)
    if rows.shape[1] == 1:
        return (rows[:, 0] < 0).long() if hard else -rows[:, 0]
    return rows.argmin(dim=1) if hard else -rows
