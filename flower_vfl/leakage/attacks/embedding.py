"""Label Leakage and Protection from Forward Embedding in Vertical Federated Learning.

Sun et al., 2022, https://arxiv.org/abs/2203.01451. A bottom model learns to separate
the classes, so that its own embeddings show a party the labels, whatever is done to the
gradients. No label is known to the attacker.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .known import Known
from .similarity import Distance, clustered, embedding_of
from .spectral import spectral_attack

Method = Literal["auto", "spectral", "k-means"]


@dataclass(frozen=True)
class EmbeddingAttack:
    """The attack on embeddings by name: spectral, or k-means for several classes.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl.leakage.attacks.known import GroupedLabels, attacker
    >>> batch = GroupedLabels.read("binary", torch.tensor([0, 0, 1, 1]))
    >>> embedding = torch.tensor([[0.0, 1.0], [0.2, 1.0], [4.0, 1.0], [4.2, 1.0]])
    >>> rows, known = attacker(batch, torch.zeros(4, 2), embedding=embedding)
    >>> EmbeddingAttack()(rows, known).round(decimals=1).tolist()
    [-2.1, -1.9, 1.9, 2.1]
    """

    method: Method = "auto"
    distance: Distance = "euclid"

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return one score per row, or one column per class."""
        seen, several = embedding_of(known), known.task == "multiclass"
        if self.method == "k-means" or (self.method == "auto" and several):
            return clustered(seen, known, self.distance)
        return spectral_attack(seen, signed=True)
