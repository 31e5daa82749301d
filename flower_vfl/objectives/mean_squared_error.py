"""Squared error of a top model, for regression."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import require

from .base import Task, TopModelObjective, finite_numbers, one_column


class MeanSquaredError(TopModelObjective):
    """Squared error of a top model's output: regression.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns one column.
    center, scale : float (default: 0.0, 1.0)
        The model learns ``(label - center) / scale``; predictions are in the labels'
        own unit. Use the mean and standard deviation of the training labels if labels
        are far from zero.

    Examples
    --------
    >>> from flower_vfl.objectives import MeanSquaredError
    >>> objective = MeanSquaredError(nn.Linear(4, 1), center=20.0, scale=5.0)
    >>> objective.predict(torch.rand(3, 4)).shape
    torch.Size([3])
    """

    task: Task = "regression"
    label_losses: ClassVar[tuple[str, ...]] = ("plain", "forward")

    def __init__(self, top: nn.Module, center: float = 0.0, scale: float = 1.0) -> None:
        super().__init__(top)
        require(scale > 0.0, "scale", "positive", scale)
        # Buffers, so that a checkpoint includes them.
        self.center: Tensor
        self.scale: Tensor
        self.register_buffer("center", torch.tensor(center))
        self.register_buffer("scale", torch.tensor(scale))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error in units of ``scale``."""
        target = (labels - self.center) / self.scale
        # The likelihood of labels with Laplace noise is that of the absolute error.
        error = F.l1_loss if self.label_loss == "forward" else F.mse_loss
        return error(one_column(output, self.task), target)

    def predict(self, embedding: Tensor) -> Tensor:
        """Return values in the labels' own unit."""
        return one_column(self.top(embedding), self.task) * self.scale + self.center

    def encode(self, labels: Tensor) -> Tensor:
        """Return float labels."""
        return finite_numbers(labels).float()
