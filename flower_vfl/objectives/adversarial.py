"""What both forms of GAFM share: the GAN loss and the training of its networks."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError

from .base import Objective, OptimizerFactory, clear_gradients, optimizers_of


def gan_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Return E[D(real)] − E[D(fake)], the Wasserstein loss of GAFM's equation 3."""
    real_score: Tensor = discriminator(real).mean()
    fake_score: Tensor = discriminator(fake).mean()
    return real_score - fake_score


def gradient_of(loss: Tensor, embedding: Tensor) -> Tensor:
    """Return the gradient of a loss for the embedding; zeros if it has none."""
    # Two losses may share a part of the graph.
    (gradient,) = torch.autograd.grad(
        loss, embedding, retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(embedding) if gradient is None else gradient


class AdversarialObjective(Objective):
    """An objective with a discriminator that ascends and a predictor that descends."""

    discriminator: nn.Module

    def __init__(self, gamma: float, sigma: float, clip: float) -> None:
        super().__init__()
        for name, value in (("gamma", gamma), ("sigma", sigma)):
            if not 0.0 <= value < float("inf"):
                raise ConfigError(
                    f"{name} must be a finite number of at least 0, got {value}"
                )
        if not 0.0 < clip < float("inf"):
            raise ConfigError(f"clip must be a finite number above 0, got {clip}")
        self.gamma, self.sigma, self.clip = gamma, sigma, clip
        self.gradient_parts: dict[str, Tensor] = {}
        self._ascent: list[Optimizer] = []
        self._descent: list[Optimizer] = []

    @property
    @abstractmethod
    def predictor(self) -> nn.Module:
        """The network that predicts labels."""

    def configure(self, make: OptimizerFactory) -> None:
        """Create one optimizer for the discriminator and one for the predictor."""
        self._ascent = optimizers_of(self.discriminator, make)
        self._descent = optimizers_of(self.predictor, make)
        self.optimizers = self._ascent + self._descent

    def train_discriminator(self, real: Tensor, fake: Tensor) -> None:
        """Take one step up the GAN loss and clamp the weights to [−clip, clip]."""
        for optimizer in self._ascent:
            _descend(optimizer, -gan_loss(self.discriminator, real, fake))
            with torch.no_grad():
                for parameter in self.discriminator.parameters():
                    parameter.clamp_(-self.clip, self.clip)

    def train_predictor(self, loss: Tensor) -> None:
        """Take one step down a loss, unless nothing is to be trained."""
        for optimizer in self._descent:
            _descend(optimizer, loss)


def _descend(optimizer: Optimizer, loss: Tensor) -> None:
    clear_gradients(optimizer)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
