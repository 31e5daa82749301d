"""Mutual Information Regularization for Vertical Federated Learning.

Zou et al., 2023, https://arxiv.org/abs/2301.01142. A variational bottleneck between the
embeddings and the top model, at the label party, lets less about the labels back.
"""

from typing import ClassVar

from torch import Tensor, nn

from flower_vfl.errors import require

from .base import Outcome, descend
from .cross_entropy import CrossEntropy


class Bottleneck(nn.Module):
    """A normal distribution for each row, and how far it is from N(0, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.learned = nn.Linear(width, 2 * width)
        nn.init.zeros_(self.learned.weight[width:])
        nn.init.constant_(self.learned.bias[width:], -4.0)  # little noise at first

    def forward(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance of every entry."""
        mean, log_variance = self.learned(embedding.flatten(1)).chunk(2, dim=1)
        return mean, log_variance.clamp(-10.0, 10.0)


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return the mean over rows of KL(N(mean, variance) ‖ N(0, 1))."""
    inner = mean.square() + log_variance.exp() - log_variance - 1.0
    return 0.5 * inner.sum(dim=1).mean()


class MID(CrossEntropy):
    """Cross entropy behind a variational bottleneck.

    Parameters
    ----------
    top : nn.Module
        Takes what passes the bottleneck, as wide as the joined embedding.
    width : int
        Columns of the joined embedding.
    classes : int (default: 2)
        As for :class:`CrossEntropy`.
    weight : float (default: 0.01)
        λ of the divergence from N(0, 1). The larger, the less passes.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl.objectives import MID
    >>> objective = MID(nn.Linear(4, 1), width=4)
    >>> embedding = torch.rand(8, 4, requires_grad=True)
    >>> outcome = objective.step(embedding, torch.arange(8.0) % 2)
    >>> outcome.gradient.shape, objective.predict(embedding).shape
    (torch.Size([8, 4]), torch.Size([8]))
    """

    hides: ClassVar[bool] = True
    label_losses: ClassVar[tuple[str, ...]] = ("plain",)

    def __init__(
        self, top: nn.Module, width: int, classes: int = 2, weight: float = 0.01
    ) -> None:
        super().__init__(top, classes)
        require(weight >= 0.0, "weight", "at least 0", weight)
        self.weight = weight
        self.bottleneck = Bottleneck(width)

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train top model and bottleneck; return the embedding's gradient."""
        mean, log_variance = self.bottleneck(embedding)
        drawn = self.own_noise().normal(mean.shape, mean.dtype).to(mean.device)
        passed = mean + (0.5 * log_variance).exp() * drawn
        spent = divergence(mean, log_variance)
        loss = self.loss(self.top(passed), labels) + self.weight * spent
        descend(self.optimizers, loss)
        assert embedding.grad is not None  # it is what the bottleneck takes
        metrics = {"divergence": float(spent.detach())}
        return Outcome(loss.detach(), embedding.grad, metrics)

    def _probabilities(self, embedding: Tensor) -> Tensor:
        return super()._probabilities(self.bottleneck(embedding)[0])
