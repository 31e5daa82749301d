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
    Compared,
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
    cosines = _cosines(compare(rows, norms, to_numpy(known.to(rows))))
    scores = torch.from_numpy(cosines.T).to(rows.device)
    return scores if several else scores[:, 0]


def _cosines(compared: Compared) -> Array:
    """Return the cosine of each row with each known one; 0 for a row of zeros."""
    both = np.sqrt(compared.lengths) * compared.norms
    np.maximum(both, np.finfo(both.dtype).tiny, out=both)
    return round_scores(compared.products / both, 1.0)


@dataclass(frozen=True)
class CosineAttack:
    """The cosine attack by name, with one known example of class 1 or of each class."""

    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass")
    knows_examples: ClassVar[bool] = True  # these rows do not count

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return the cosines, with one column per class of a multi-class task."""
        compared = compare(gradient, known.norms, self.vectors(gradient, known))
        return torch.from_numpy(self.score(compared, known).T).to(gradient.device)

    def vectors(self, rows: Tensor, known: Known) -> Array:
        """Return the known gradients."""
        clean, chosen = to_numpy(known.clean), known.examples
        if rows.ndim > 2:  # of several parties
            vectors = clean[range(len(clean)), chosen][:, None]
        else:
            vectors = clean[chosen]
        return vectors.astype(to_numpy(known.norms).dtype, copy=False)

    def score(self, compared: Compared, known: Known) -> Array:
        """Return the cosines with each of the known gradients, or with the only one."""
        cosines = _cosines(compared)
        return cosines[..., 0, :] if known.task == "binary" else cosines
