"""The spectral attack, which finds the smaller of two groups of rows.

Sun et al., FLORIST, https://arxiv.org/abs/2106.05508, appendix C, after Tran et al.,
Spectral Signatures in Backdoor Attacks. On the union it looks for rows that another
party lacks: a passive party scores the gradients it gets, the label party the
embeddings, joined with its labels. The party that made the synthetic rows knows the
truth, so each measures its own side.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.leakage.auc import leak_auc
from flower_vfl.objectives import Task

from .known import Known, as_rows, rows_and_norms


def spectral_attack(gradient: Tensor, signed: bool = False) -> Tensor:
    """Return how far every row is from the mean along the direction of most variance.

    Parameters
    ----------
    gradient : Tensor
        One row per example: gradients, or embeddings joined with labels.
    signed : bool (default: False)
        Keep on which side of the mean a row is. Two groups of the same size lie as far
        from their common mean, and only this tells them apart.

    Examples
    --------
    >>> spectral_attack(torch.tensor([[0.0, 1], [0, 1], [0, 1], [8, 1]])).tolist()
    [2.0, 2.0, 2.0, 6.0]
    """
    rows, _ = rows_and_norms(gradient)
    distances = (rows - rows.mean(dim=0)) @ top_direction(rows)
    return distances if signed else distances.abs()


def top_direction(rows: Tensor) -> Tensor:
    """Return the first right singular vector of the centered rows."""
    centered = rows.double() - rows.double().mean(dim=0)
    centered = centered / centered.abs().amax().clamp_min(1e-300)
    count, width = centered.shape
    direction: Tensor
    if width <= count:
        direction = torch.linalg.eigh(centered.T @ centered)[1][:, -1]
    else:
        direction = centered.T @ torch.linalg.eigh(centered @ centered.T)[1][:, -1]
        direction = direction / direction.norm().clamp_min(1e-300)
    # The sign depends on the solver, so the largest entry is made positive.
    largest = direction.gather(0, direction.abs().argmax(dim=0, keepdim=True))
    return (direction * torch.where(largest < 0, -1.0, 1.0)).to(rows.dtype)


def spectral_scores(gradient: Tensor, known: Known) -> Tensor:
    """Return the distances from the mean, signed for a regression."""
    return spectral_attack(gradient, signed=known.task == "regression")


def membership_aucs(seen: Tensor, real: Tensor) -> dict[str, float]:
    """Return the AUCs of the spectral attack against "is synthetic".

    Parameters
    ----------
    seen, real : Tensor
        What the attacker sees of each row of a batch, and which rows are real.

    Returns
    -------
    dict[str, float]
        ``""`` for the distance from the mean, the paper's score, and ``"_sides"`` for
        the side (its "2-clustering"), as max(a, 1 − a): it tells two groups of equal
        size apart, but its sign is arbitrary. Nothing where all or no rows are real.

    Examples
    --------
    >>> seen = torch.tensor([[0.0], [0.0], [0.0], [8.0]])
    >>> membership_aucs(seen, real=torch.tensor([True, True, True, False]))
    {'': 1.0, '_sides': 1.0}
    """
    if bool(real.all()) or not bool(real.any()):
        return {}
    scores, synthetic = spectral_attack(seen, signed=True), ~real.to(seen.device)
    return {
        "": leak_auc(scores.abs(), synthetic),
        "_sides": leak_auc(scores, synthetic, flipped=True),
    }


def with_labels(embedding: Tensor, labels: Tensor | None, task: Task) -> Tensor:
    """Return embeddings and labels side by side, as the label party sees them."""
    rows = as_rows(embedding)
    if labels is None:
        return rows
    known = labels.to(rows.device)
    columns = F.one_hot(known.long()) if task == "multiclass" else known[:, None]
    return torch.cat([rows, columns.to(rows)], dim=1)
