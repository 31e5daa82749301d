"""Label Leakage and Protection from Forward Embedding in Vertical Federated Learning.

Sun et al., 2022, https://arxiv.org/abs/2203.01451.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import require

from .base import Outcome, descend
from .cross_entropy import CrossEntropy


def distance_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Return the distance correlation of two sets of rows, from 0 to 1."""
    centered = []
    for rows in (x, y):
        distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        by_row = distances.mean(dim=0, keepdim=True)
        centered.append(distances - by_row - by_row.T + distances.mean())
    a, b = centered
    variances = (a.square().mean() * b.square().mean()).clamp_min(1e-30).sqrt()
    return ((a * b).mean().clamp_min(0.0) / variances).clamp_min(1e-12).sqrt()


class DistanceCorrelation(CrossEntropy):
    """Cross entropy, with embeddings that depend less on the labels.

    Adds α·log of the distance correlation between each party's embedding and the
    labels, so that bottom models learn embeddings which show the labels less.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns logits.
    classes : int (default: 2)
        As for :class:`CrossEntropy`.
    alpha : float (default: 0.1)
        Weight of the distance correlation.
    parts : int (default: 1)
        Number of embeddings of equal width in the joined one.

    Examples
    --------
    >>> from flower_vfl.objectives import DistanceCorrelation
    >>> objective = DistanceCorrelation(nn.Linear(4, 1), alpha=0.5, parts=2)
    >>> embedding = torch.rand(8, 4, requires_grad=True)
    >>> outcome = objective.step(embedding, torch.arange(8.0) % 2)
    >>> 0.0 < outcome.metrics["distance_correlation"] <= 1.0
    True
    """

    def __init__(
        self, top: nn.Module, classes: int = 2, alpha: float = 0.1, parts: int = 1
    ) -> None:
        super().__init__(top, classes)
        require(alpha >= 0.0, "alpha", "at least 0", alpha)
        require(parts >= 1, "parts", "at least 1", parts)
        self.alpha, self.parts = alpha, parts

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train the top model on one batch and return the embedding's gradient."""
        received = embedding.clone()
        truth = F.one_hot(labels.long(), self.classes).to(embedding)
        found = [
            distance_correlation(part.flatten(1), truth)
            for part in received.chunk(self.parts, dim=1)
        ]
        loss = self.loss(self.top(received), labels)
        total = loss + self.alpha * torch.stack(found).log().sum()
        (gradient,) = torch.autograd.grad(total, embedding, retain_graph=True)
        descend(self.optimizers, loss, list(self.top.parameters()))
        largest = max(float(each.detach()) for each in found)
        return Outcome(total.detach(), gradient, {"distance_correlation": largest})
