"""Label Leakage and Protection in Two-party Split Learning: the cosine attack.

Li et al., ICLR 2022, https://arxiv.org/abs/2102.08504
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flower_vfl.objectives import Task

from .known import Known, as_rows, products, round_scores, rows_and_norms, to_numpy


def cosine_attack(gradient: Tensor, positive: Tensor) -> Tensor:
    """Return the cosine between every row and a positive example's clean gradient.

    Parameters
    ----------
    gradient : Tensor
        One row per example.
    positive : Tensor
        One row: a positive example's gradient before any defense. Or several rows, one
        for each class, for a score with one column per class.

    Examples
    --------
    >>> gradient = torch.tensor([[2.0, 0.0], [-1.0, 0.0]])
    >>> cosine_attack(gradient, torch.tensor([3.0, 0.0])).tolist()
    [1.0, -1.0]
    """
    rows, norms = rows_and_norms(gradient)
    several = positive.shape != gradient.shape[1:]
    known = as_rows(positive.reshape(-1, rows.shape[1]))
    cosines = _cosines(rows, norms, known)
    return cosines if several else cosines[:, 0]


def _cosines(rows: Tensor, norms: Tensor, known: Tensor) -> Tensor:
    """Return the cosine of each row with each known one; 0 for a row of zeros."""
    vectors, lengths = to_numpy(known.to(rows)), to_numpy(norms)
    both = np.linalg.norm(vectors, axis=-1, keepdims=True) * lengths[..., None, :]
    both = np.maximum(both, np.finfo(both.dtype).tiny)
    cosines = round_scores(products(rows, vectors) / both, 1.0)
    return torch.from_numpy(cosines.swapaxes(-1, -2)).to(rows.device)


@dataclass(frozen=True)
class CosineAttack:
    """The cosine attack by name, with one known example of class 1 or of each class."""

    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass")
    knows_examples: ClassVar[bool] = True  # these rows do not count

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return the cosines, with one column per class of a multi-class task."""
        if gradient.ndim > 2:  # of several parties
            pairs = zip(known.clean, known.examples, strict=True)
            positive = torch.stack([clean[row, None] for clean, row in pairs])
        else:
            positive = torch.stack([known.clean[i] for i in known.examples])
        cosines = _cosines(gradient, known.norms, positive)
        return cosines[..., 0] if known.task == "binary" else cosines
