"""Label Leakage and Protection in Two-party Split Learning: the cosine attack.

Li et al., ICLR 2022, https://arxiv.org/abs/2102.08504
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flower_vfl.objectives import Task

from .known import (
    Array,
    Known,
    as_rows,
    compare,
    round_scores,
    rows_and_norms,
    to_numpy,
)


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
    scores = cosines(*compare(rows, norms, to_numpy(known.to(rows))))
    found = torch.from_numpy(round_scores(scores, 1.0).T).to(rows.device)
    return found if several else found[:, 0]


def cosines(products: Array, lengths: Array, norms: Array) -> Array:
    """Return the cosine of each row with each known one; 0 for a row of zeros."""
    both = np.sqrt(lengths) * norms
    np.maximum(both, np.finfo(both.dtype).tiny, out=both)
    found: Array = products / both
    return found


@dataclass(frozen=True)
class CosineAttack:
    """The cosine attack by name, with one known example of class 1 or of each class."""

    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass")
    knows_examples: ClassVar[bool] = True  # these rows do not count

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return the cosines, with one column per class of a multi-class task."""
        rows = to_numpy(known.clean)[known.examples]
        vectors = rows.astype(to_numpy(known.norms).dtype, copy=False)
        scores = round_scores(cosines(*compare(gradient, known.norms, vectors)), 1.0)
        binary = known.task == "binary"
        return torch.from_numpy(scores[0] if binary else scores.T).to(gradient.device)
