"""Defending Batch-Level Label Inference and Replacement Attacks: CoAE.

Zou et al., 2022, https://arxiv.org/abs/2112.05409. A confusional autoencoder gives
every class a soft label that looks like a guess; the models learn these, and its
decoder turns their predictions back. With discretised gradients (``multi-bucket``) it
is the paper's DCAE.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import require

from .base import OptimizerFactory, Outcome, descend, optimizers_of
from .cross_entropy import CrossEntropy

_HIDDEN, _STEPS, _RATE = 32, 600, 0.01  # of the autoencoder


def confusion_loss(soft: Tensor, decoded: Tensor, weight: float) -> Tensor:
    """Return the cross entropy of the decoder minus λ times the labels' entropy."""
    right = F.cross_entropy(decoded, torch.arange(len(soft), device=soft.device))
    entropy = -(soft * soft.clamp_min(1e-12).log()).sum(dim=1).mean()
    return right - weight * entropy


class CoAE(CrossEntropy):
    """Cross entropy against the soft labels of a confusional autoencoder.

    The autoencoder is trained before the first step, from secret random numbers.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns logits.
    classes : int (default: 2)
        As for :class:`CrossEntropy`.
    weight : float (default: 0.5)
        λ of the soft labels' entropy. The larger, the more alike they are; with 1 or
        more the decoder may not tell them apart any more.

    Examples
    --------
    >>> from flower_vfl.objectives import CoAE
    >>> objective = CoAE(nn.Linear(4, 3), classes=3)
    >>> embedding = torch.rand(6, 4, requires_grad=True)
    >>> outcome = objective.step(embedding, torch.arange(6) % 3)
    >>> objective.soft_labels().argmax(dim=1).unique().shape[0] <= 3
    True
    """

    hides: ClassVar[bool] = True
    takes_shares: ClassVar[bool] = False
    calibrates: ClassVar[bool] = False
    label_losses: ClassVar[tuple[str, ...]] = ("plain",)

    def __init__(self, top: nn.Module, classes: int = 2, weight: float = 0.5) -> None:
        super().__init__(top, classes)
        require(weight >= 0.0, "weight", "at least 0", weight)
        self.weight = weight
        sizes = (classes, _HIDDEN), (_HIDDEN, classes)
        self.encoder, self.decoder = (
            nn.Sequential(nn.Linear(*sizes[0]), nn.ReLU(), nn.Linear(*sizes[1]))
            for _ in range(2)
        )
        self.trained: Tensor
        self.register_buffer("trained", torch.zeros((), dtype=torch.bool))

    def configure(self, make: OptimizerFactory) -> None:
        """Create the optimizer of the top model; the autoencoder has its own."""
        self.optimizers = optimizers_of(self.top, make)

    def soft_labels(self) -> Tensor:
        """Return the soft label of each class, one row each."""
        classes = torch.eye(self.classes, device=self.trained.device)
        return torch.softmax(self.encoder(classes), dim=1)

    def _train_autoencoder(self) -> None:
        stream = self.own_noise()
        parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
        with torch.no_grad():  # nobody else knows which class has which soft label
            for weight in parameters:
                if weight.ndim == 2:
                    drawn = stream.normal(weight.shape, weight.dtype).to(weight.device)
                    weight.copy_(drawn * (2.0 / weight.shape[1]) ** 0.5)
        optimizer = torch.optim.Adam(parameters, _RATE)
        for _ in range(_STEPS):
            soft = self.soft_labels()
            descend([optimizer], confusion_loss(soft, self.decoder(soft), self.weight))
        self.trained.fill_(True)

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train the top model on soft labels and return the embedding's gradient."""
        if not self.trained:
            self._train_autoencoder()
        soft = self.soft_labels().detach()[labels.long()]
        return super().step(embedding, soft[:, 1] if self.task == "binary" else soft)

    def _probabilities(self, embedding: Tensor) -> Tensor:
        found = super()._probabilities(embedding)
        if self.task == "binary":
            found = torch.stack([1.0 - found, found], dim=1)
        decoded = torch.softmax(self.decoder(found), dim=1)
        return decoded[:, 1] if self.task == "binary" else decoded
