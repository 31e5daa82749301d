"""The spectral attack on the union: it looks for rows that another party lacks.

Sun et al., FLORIST, appendix C (after Tran et al., Spectral Signatures in Backdoor
Attacks). https://arxiv.org/abs/2106.05508

A passive party scores the gradients it gets; those of synthetic labels may stand apart.
The label party scores the embeddings it gets, joined with its labels. The truth is
known to the party that made the synthetic rows, so that each measures its own side.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.leakage.auc import leak_auc
from flower_vfl.objectives import Task

from .known import as_rows
from .spectral import spectral_attack


def membership_aucs(seen: Tensor, real: Tensor) -> dict[str, float]:
    """Return the AUCs of the spectral attack against "is synthetic".

    The paper's score is the distance from the mean, whose AUC is given as it is. Where
    half of the rows are synthetic, two groups lie as far from their common mean, and
    only the side tells them apart (the paper's "2-clustering"): its AUC is given as
    max(a, 1 − a), because the sign of a direction is arbitrary.

    Parameters
    ----------
    seen : Tensor
        What the attacker sees of each row of a batch, of any shape.
    real : Tensor
        Which rows are real.

    Returns
    -------
    dict[str, float]
        ``""`` for the distance and ``"_sides"`` for the side; nothing where all rows
        are real, or none is.

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
