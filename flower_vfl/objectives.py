"""What the label party optimises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigError

Task = Literal["binary", "multiclass", "regression"]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass
class Outcome:
    """What one training step of an objective brings.

    Parameters
    ----------
    loss : Tensor
        The loss of the batch.
    gradient : Tensor
        Gradient of the loss with respect to the joined embedding.
    metrics : dict[str, float] (default: {})
        Anything else worth recording.
    """

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def clear_gradients(optimizer: Optimizer) -> None:
    """Do what ``optimizer.zero_grad()`` does, without its profiling hooks.

    Parameters
    ----------
    optimizer : Optimizer | None
        The optimizer.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class Objective(nn.Module, ABC):
    """Base of all objectives: owns its modules, their optimizers and the loss.

    A subclass registers its modules as attributes (so that they move between devices
    and are saved) and implements :meth:`step` and :meth:`predict`.
    """

    task: Task

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: list[Optimizer] = []

    def configure(self, make: OptimizerFactory) -> None:
        """Create the optimizers; one over all parameters unless a subclass differs.

        Parameters
        ----------
        make : OptimizerFactory
            The label party's choice of optimizer.
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        self.optimizers = [make(parameters)] if parameters else []

    @abstractmethod
    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train the own modules on one batch and return the embedding's gradient.

        Parameters
        ----------
        embedding : Tensor
            The joined embedding, a leaf that requires a gradient.
        labels : Tensor
            Labels of the batch.
        """

    @abstractmethod
    def predict(self, embedding: Tensor) -> Tensor:
        """Return probabilities or values for a joined embedding.

        Parameters
        ----------
        embedding : Tensor
            The joined embedding.
        """

    @abstractmethod
    def encode(self, labels: Tensor) -> Tensor:
        """Return labels in the form that the loss takes; refuse those it cannot.

        Parameters
        ----------
        labels : Tensor
            Labels as the label party was given them.
        """


class TopModelObjective(Objective):
    """An objective that is a loss of a top model's output.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding.
    """

    def __init__(self, top: nn.Module) -> None:
        super().__init__()
        self.top = top
        # Autograd lets nobody change a leaf in place, and the embedding is one.
        self._in_place = any(getattr(m, "inplace", False) for m in top.modules())

    @abstractmethod
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch.

        Parameters
        ----------
        output : Tensor
            What the top model returned.
        labels : Tensor
            Labels as :meth:`encode` returned them.
        """

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train the top model on one batch and return the embedding's gradient.

        Parameters
        ----------
        embedding : Tensor
            The joined embedding, a leaf that requires a gradient.
        labels : Tensor
            Labels of the batch.
        """
        for optimizer in self.optimizers:
            clear_gradients(optimizer)
        received = embedding.clone() if self._in_place else embedding
        loss = self.loss(self.top(received), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        gradient = embedding.grad
        if gradient is None:
            gradient = torch.zeros_like(embedding)
        return Outcome(loss.detach(), gradient)


def _one_column(output: Tensor, task: str) -> Tensor:
    """Return a (B,) view of an output that must have one column."""
    if output.dim() == 2 and output.shape[1] == 1:
        return output[:, 0]
    if output.dim() == 1:
        return output
    raise ConfigError(
        f"a top model for a {task} task must have one output column, got the shape "
        f"{tuple(output.shape)}; end it in nn.Linear(..., 1)"
    )


def _finite_numbers(labels: Tensor) -> Tensor:
    if labels.dim() != 1:
        raise ConfigError(
            f"labels must be one number per row, got the shape {tuple(labels.shape)}"
        )
    bad = int((~torch.isfinite(labels.double())).sum())
    if bad:
        raise ConfigError(
            f"{bad} of {len(labels)} labels are missing or infinite; drop or fill them"
        )
    return labels


class CrossEntropy(TopModelObjective):
    """Cross entropy of a top model's logits: vanilla split learning.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns logits.
    classes : int (default: 2)
        With 2 the task is binary: the top model has one output column and the loss is
        binary cross entropy. With more it has one output column per class.
    """

    def __init__(self, top: nn.Module, classes: int = 2) -> None:
        super().__init__(top)
        if classes < 2:
            raise ConfigError(f"cross entropy needs at least 2 classes, got {classes}")
        self.classes = classes
        self.task: Task = "binary" if classes == 2 else "multiclass"

    def _logits(self, output: Tensor) -> Tensor:
        if self.task == "binary":
            return _one_column(output, self.task)
        if output.dim() != 2 or output.shape[1] != self.classes:
            raise ConfigError(
                f"a top model for {self.classes} classes must have as many output "
                f"columns, got the shape {tuple(output.shape)}"
            )
        return output

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy.

        Parameters
        ----------
        output : Tensor
            Logits.
        labels : Tensor
            Labels as :meth:`encode` returned them.
        """
        logits = self._logits(output)
        if self.task == "binary":
            return F.binary_cross_entropy_with_logits(logits, labels)
        return F.cross_entropy(logits, labels)

    def predict(self, embedding: Tensor) -> Tensor:
        """Return the probability of class 1, or of each class.

        Parameters
        ----------
        embedding : Tensor
            The joined embedding.
        """
        logits = self._logits(self.top(embedding))
        if self.task == "binary":
            return torch.sigmoid(logits)
        return torch.softmax(logits, dim=1)

    def encode(self, labels: Tensor) -> Tensor:
        """Return float labels (binary) or class numbers (multi-class).

        Parameters
        ----------
        labels : Tensor
            Whole numbers from 0 to classes - 1.
        """
        labels = _finite_numbers(labels)
        outside = (labels < 0) | (labels > self.classes - 1) | (labels != labels.long())
        if outside.any():
            first = labels[outside][0].item()
            raise ConfigError(
                f"labels of a task with {self.classes} classes must be whole numbers "
                f"from 0 to {self.classes - 1}; {int(outside.sum())} are not, the "
                f"first is {first:g}. Recode them, or choose the objective that fits"
            )
        return labels.float() if self.task == "binary" else labels.long()


class MeanSquaredError(TopModelObjective):
    """Squared error of a top model's output: regression.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns one column.
    center, scale : float (default: 0.0, 1.0)
        The model learns ``(label - center) / scale``; predictions are in the labels'
        own unit again. Mean and standard deviation of the training labels are a good
        choice when labels are far from zero.
    """

    task: Task = "regression"

    def __init__(self, top: nn.Module, center: float = 0.0, scale: float = 1.0) -> None:
        super().__init__(top)
        if not scale > 0.0:
            raise ConfigError(f"scale must be positive, got {scale}")
        # Buffers, so that a checkpoint brings them along.
        self.center: Tensor
        self.scale: Tensor
        self.register_buffer("center", torch.tensor(center))
        self.register_buffer("scale", torch.tensor(scale))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error in units of ``scale``.

        Parameters
        ----------
        output : Tensor
            What the top model returned.
        labels : Tensor
            Labels as :meth:`encode` returned them.
        """
        target = (labels - self.center) / self.scale
        return F.mse_loss(_one_column(output, self.task), target)

    def predict(self, embedding: Tensor) -> Tensor:
        """Return values in the labels' own unit.

        Parameters
        ----------
        embedding : Tensor
            The joined embedding.
        """
        return _one_column(self.top(embedding), self.task) * self.scale + self.center

    def encode(self, labels: Tensor) -> Tensor:
        """Return float labels.

        Parameters
        ----------
        labels : Tensor
            Finite numbers.
        """
        return _finite_numbers(labels).float()
