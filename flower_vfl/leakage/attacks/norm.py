"""Label Leakage and Protection in Two-party Split Learning: the norm attack.

Li et al., ICLR 2022, https://arxiv.org/abs/2102.08504
"""

from torch import Tensor

from .known import Known, as_rows, finite_norms


def norm_attack(gradient: Tensor) -> Tensor:
    """Return the norm of every row: positives of a rare class have longer ones.

    Parameters
    ----------
    gradient : Tensor
        One row per example.

    Examples
    --------
    >>> import torch
    >>> norm_attack(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()
    [5.0, 1.0]
    """
    return finite_norms(as_rows(gradient))


def norm_scores(gradient: Tensor, known: Known) -> Tensor:
    """Return the norms, which are known for all attacks: the attack by name."""
    return known.norms
