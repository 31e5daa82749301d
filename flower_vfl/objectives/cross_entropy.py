"""Cross entropy of a top model, the objective of vanilla split learning."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError

from .base import Task, TopModelObjective, class_numbers, one_column


class CrossEntropy(TopModelObjective):
    """Cross entropy of a top model's logits: vanilla split learning.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns logits.
    classes : int (default: 2)
        With 2 the task is binary: the top model has one output column and the loss is
        binary cross entropy. With more it has one output column per class.

    Examples
    --------
    >>> from flower_vfl.objectives import CrossEntropy
    >>> objective = CrossEntropy(nn.Linear(4, 1))
    >>> embedding = torch.rand(3, 4, requires_grad=True)
    >>> outcome = objective.step(embedding, torch.tensor([0.0, 1.0, 1.0]))
    >>> outcome.gradient.shape
    torch.Size([3, 4])
    """

    takes_shares: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    label_losses: ClassVar[tuple[str, ...]] = ("plain", "unbiased", "forward")

    def __init__(self, top: nn.Module, classes: int = 2) -> None:
        super().__init__(top)
        if classes < 2:
            raise ConfigError(f"cross entropy needs at least 2 classes, got {classes}")
        self.classes = classes
        self.task: Task = "binary" if classes == 2 else "multiclass"

    def _logits(self, output: Tensor) -> Tensor:
        if self.task == "binary":
            return one_column(output, self.task)
        if output.dim() != 2 or output.shape[1] != self.classes:
            classes, shape = f"{self.classes} classes", tuple(output.shape)
            problem = f"must have as many output columns, got the shape {shape}"
            raise ConfigError(f"a top model for {classes} {problem}")
        return output

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        logits = self._logits(output)
        if self.calibration is not None and self.calibration.when == "tr":
            return self.calibration.loss(*self._by_class(logits, labels))
        if self.task == "binary":
            return F.binary_cross_entropy_with_logits(logits, labels)
        return F.cross_entropy(logits, labels)

    def predict(self, embedding: Tensor) -> Tensor:
        """Return the probability of class 1, or of each class."""
        found = self._probabilities(embedding)
        return found if self.calibration is None else self.calibration.to_real(found)

    def expect(self, embedding: Tensor) -> Tensor:
        """Return the probabilities that the loss compares with labels."""
        found = self._probabilities(embedding)
        return found if self.calibration is None else self.calibration.to_mixture(found)

    def _by_class(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logarithms of probabilities and labels with one column per class."""
        if self.task == "multiclass":
            return F.log_softmax(logits, dim=1), labels
        logs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=1)
        return logs, torch.stack([1.0 - labels, labels], dim=1)

    def _probabilities(self, embedding: Tensor) -> Tensor:
        logits = self._logits(self.top(embedding))
        if self.task == "binary":
            return torch.sigmoid(logits)
        return torch.softmax(logits, dim=1)

    def encode(self, labels: Tensor) -> Tensor:
        """Return float labels (binary) or class numbers (multi-class)."""
        return class_numbers(labels, self.classes)
