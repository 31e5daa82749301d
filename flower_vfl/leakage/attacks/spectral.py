"""The spectral attack of FLORIST, which finds the smaller of two groups of rows.

Sun et al., FLORIST, https://arxiv.org/abs/2106.05508, appendix C, after Tran et al.,
Spectral Signatures in Backdoor Attacks.
"""

import torch
from torch import Tensor

from .known import Known, rows_and_norms


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

    Examples
    --------
    >>> spectral_attack(torch.tensor([[0.0, 1], [0, 1], [0, 1], [8, 1]])).tolist()
    [2.0, 2.0, 2.0, 6.0]
    """
    rows, _ = rows_and_norms(gradient)
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


def spectral_scores(gradient: Tensor, known: Known) -> Tensor:
    """Return the distances from the mean, signed for a regression."""
    return spectral_attack(gradient, signed=known.task == "regression")
