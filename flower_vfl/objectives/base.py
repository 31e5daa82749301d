"""Base classes of the label party's objectives, and checks of labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError, require
from flower_vfl.randomness import Noise

if TYPE_CHECKING:
    from flower_vfl.parties.imputation.label_imputer import Calibration

Task = Literal["binary", "multiclass", "regression"]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass
class Outcome:
    """The result of one training step of an objective.

    Parameters
    ----------
    loss, gradient : Tensor
        The loss of the batch, and its gradient with respect to the joined embedding.
    metrics : dict[str, float] (default: {})
        Further training metrics.

    Examples
    --------
    >>> from flower_vfl.objectives import Outcome
    >>> Outcome(torch.tensor(0.5), torch.zeros(8, 2), {"gan_loss": 0.1}).metrics
    {'gan_loss': 0.1}
    """

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def clear_gradients(optimizer: Optimizer) -> None:
    """Clear gradients like ``optimizer.zero_grad()``, without its profiling hooks.

    Examples
    --------
    >>> from flower_vfl.objectives import clear_gradients
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.sum().backward()
    >>> clear_gradients(torch.optim.SGD([weight], lr=0.1))
    >>> weight.grad is None
    True
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def descend(
    optimizers: list[Optimizer], loss: Tensor, inputs: list[nn.Parameter] | None = None
) -> None:
    """Take one step of each optimizer down a loss, with gradients for `inputs` only."""
    for optimizer in optimizers:
        clear_gradients(optimizer)
    loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()


def optimizers_of(module: nn.Module, make: OptimizerFactory) -> list[Optimizer]:
    """Return one optimizer over all parameters; none if none is to be trained."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [make(parameters)] if parameters else []


class Objective(nn.Module, ABC):
    """Base class of all objectives: owns its modules, their optimizers and the loss.

    A subclass registers its modules as attributes, so that they move between devices
    and are saved, and implements :meth:`step`, :meth:`predict` and :meth:`encode`. It
    draws random numbers from torch's global generators: the label party activates its
    own random state around every call.

    Examples
    --------
    >>> from flower_vfl.objectives import Objective, Outcome
    >>> class SquaredSum(Objective):
    ...     task = "regression"
    ...     def predict(self, embedding):
    ...         return embedding.sum(dim=1)
    ...     def step(self, embedding, labels):
    ...         loss = (self.predict(embedding) - labels).square().mean()
    ...         loss.backward()
    ...         return Outcome(loss.detach(), embedding.grad)
    ...     def encode(self, labels):
    ...         return labels.float()
    >>> embedding = torch.ones(1, 2, requires_grad=True)
    >>> SquaredSum().step(embedding, torch.tensor([1.0])).gradient
    tensor([[2., 2.]])
    """

    task: Task
    # Whether labels may be class probabilities, and predictions calibrated.
    takes_shares: ClassVar[bool] = False
    calibrates: ClassVar[bool] = False
    # Whether it looks up labels by row number.
    by_row: ClassVar[bool] = False
    # Whether it hides labels with random numbers of its own, taken from `noise`.
    hides: ClassVar[bool] = False
    # The losses that it has for randomised labels: flower_vfl.privacy.
    label_losses: ClassVar[tuple[str, ...]] = ("plain",)

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: list[Optimizer] = []
        # Corrects probabilities for synthetic rows; the label party sets it.
        self.calibration: Calibration | None = None
        # Row numbers of the batch; the label party sets them before a step.
        self.rows: Tensor | None = None
        # Secret random numbers of the step, for an objective that hides labels.
        self.noise: Noise | None = None
        # Which of `label_losses` it takes; the label party sets it.
        self.label_loss = "plain"

    def own_noise(self) -> Noise:
        """Return the label party's secret numbers, or torch's outside of a party."""
        return self.noise or Noise(int(torch.randint(2**62, (1,))))

    def configure(self, make: OptimizerFactory) -> None:
        """Create the optimizers; one over all parameters unless a subclass differs."""
        self.optimizers = optimizers_of(self, make)

    def prepare(
        self, features: Sequence[Tensor], labels: Tensor, training: Tensor
    ) -> None:
        """Store the label party's data; also called when a party restarts in a run."""

    @abstractmethod
    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train on a batch; the joined embedding is a leaf that requires a gradient."""

    @abstractmethod
    def predict(self, embedding: Tensor) -> Tensor:
        """Return probabilities or values for a joined embedding."""

    def expect(self, embedding: Tensor) -> Tensor:
        """Return what the loss compares with labels: predictions, if not calibrated."""
        return self.predict(embedding)

    @abstractmethod
    def encode(self, labels: Tensor) -> Tensor:
        """Return labels in the form that the loss takes; refuse invalid ones."""


class TopModelObjective(Objective):
    """Base class of objectives that are a loss of a top model's output.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding.

    Examples
    --------
    >>> from flower_vfl.objectives import TopModelObjective
    >>> class AbsoluteError(TopModelObjective):
    ...     task = "regression"
    ...     def loss(self, output, labels):
    ...         return (output[:, 0] - labels).abs().mean()
    ...     def predict(self, embedding):
    ...         return self.top(embedding)[:, 0]
    ...     def encode(self, labels):
    ...         return labels.float()
    >>> AbsoluteError(nn.Linear(4, 1)).predict(torch.rand(3, 4)).shape
    torch.Size([3])
    """

    def __init__(self, top: nn.Module) -> None:
        super().__init__()
        self.top = top
        # Autograd forbids to change a leaf, such as the embedding, in place.
        self._in_place = any(getattr(m, "inplace", False) for m in top.modules())

    @abstractmethod
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch."""

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train the top model on one batch and return the embedding's gradient."""
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


def one_column(output: Tensor, task: str) -> Tensor:
    """Return a (B,) view of an output that must have one column."""
    if output.dim() == 2 and output.shape[1] == 1:
        return output[:, 0]
    if output.dim() == 1:
        return output
    problem = f"one output column, got the shape {tuple(output.shape)}"
    remedy = "end it in nn.Linear(..., 1)"
    raise ConfigError(f"a top model for a {task} task must have {problem}; {remedy}")


def finite_numbers(labels: Tensor) -> Tensor:
    """Return labels that are one finite number per row; refuse any other."""
    shape = f"the shape {tuple(labels.shape)}"
    require(labels.dim() == 1, "labels", "one number per row", shape)
    bad = int((~torch.isfinite(labels.double())).sum())
    if bad:
        raise ConfigError(
            f"{bad} of {len(labels)} labels are missing or infinite; drop or fill them"
        )
    return labels


def class_numbers(labels: Tensor, classes: int) -> Tensor:
    """Return labels that are whole numbers from 0 to classes - 1; refuse any other."""
    labels = finite_numbers(labels)
    outside = (labels < 0) | (labels > classes - 1) | (labels != labels.long())
    if outside.any():
        count, first = int(outside.sum()), int(outside.nonzero()[0])
        problem = f"{count} are no whole numbers from 0 to {classes - 1}"
        where = f"the first in row {first}. Recode them, or choose another objective"
        raise ConfigError(f"labels of {classes} classes: {problem}, {where}")
    return labels.float() if classes == 2 else labels.long()
