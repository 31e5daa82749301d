"""Generative Adversarial Federated Model: GAFM in its first form."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError, unknown_name

from .adversarial import (
    ascend,
    check_settings,
    descend_on,
    gan_loss,
    gradient_of,
    optimizer_of,
)
from .base import (
    Objective,
    OptimizerFactory,
    Outcome,
    Task,
    class_numbers,
    finite_numbers,
)

GAMMA = {"binary": 300.0, "regression": 800.0}


class GAFMOriginal(Objective):
    """Generative Adversarial Federated Model, the paper's first form.

    Every party sends a prediction of one column; Ŷ is the LeakyReLU of their sum (the
    columns of a wider or concatenated embedding are summed too). A decoder M, one
    linear layer (with a sigmoid for labels 0 and 1), makes the prediction; the
    discriminator D, one linear layer with a LeakyReLU, compares Ŷ with noisy
    labels. Per batch, D climbs L_GAN = E[D(Y+ε)] − E[D(Ŷ)] and its weights are clipped,
    M descends L_recon (BCE, or squared error), and the parties receive the gradient of
    γ·L_GAN + L_recon as it is.

    The paper prints L_GAN + γ·L_recon. With that, the GAN part is hundreds of times
    smaller than the rest and nothing is protected: see `literal`.

    Parameters
    ----------
    task : {"binary", "regression"} (default: "binary")
        What the labels are.
    gamma : float | None (default: None)
        γ; None is 300, for a regression 800. What is right for a regression depends on
        the unit of its labels: 800 is too much for some that are centred and scaled.
    sigma : float (default: 1.0)
        Standard deviation of the noise ε on the labels; the paper tries 0.25, 1 and 3.
    clip : float (default: 0.01)
        c: the discriminator's weights stay within ±c.
    literal : bool (default: False)
        Put γ on L_recon, as the paper prints it.
    center, scale : float (default: 0.0, 1.0)
        A regression learns ``(label - center) / scale``, as
        :class:`MeanSquaredError` does.

    Attributes
    ----------
    gradient_parts : dict[str, Tensor]
        The two parts of the last gradient, each with its weight.
    """

    def __init__(
        self,
        task: Literal["binary", "regression"] = "binary",
        gamma: float | None = None,
        sigma: float = 1.0,
        clip: float = 0.01,
        literal: bool = False,
        center: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if task not in GAMMA:
            raise unknown_name("task of GAFMOriginal", task, GAMMA)
        self.task: Task = task
        self.gamma = GAMMA[task] if gamma is None else gamma
        check_settings(self.gamma, sigma, clip)
        if not scale > 0.0:
            raise ConfigError(f"scale must be positive, got {scale}")
        if task == "binary" and (center, scale) != (0.0, 1.0):
            raise ConfigError("center and scale are for a regression")
        self.sigma, self.clip, self.literal = sigma, clip, literal
        self.center: Tensor
        self.scale: Tensor
        self.register_buffer("center", torch.tensor(center))
        self.register_buffer("scale", torch.tensor(scale))
        self.decoder = nn.Linear(1, 1)
        self.discriminator = nn.Sequential(nn.Linear(1, 1), nn.LeakyReLU())
        self.gradient_parts: dict[str, Tensor] = {}
        self._climber: Optimizer | None = None
        self._descender: Optimizer | None = None

    def configure(self, make: OptimizerFactory) -> None:
        """Create one optimizer for the discriminator and one for the decoder."""
        self._climber = optimizer_of(self.discriminator, make)
        self._descender = optimizer_of(self.decoder, make)
        both = (self._climber, self._descender)
        self.optimizers = [made for made in both if made is not None]

    def aggregate(self, embedding: Tensor) -> Tensor:
        """Return Ŷ (B, 1), the LeakyReLU of the summed columns."""
        return F.leaky_relu(embedding.flatten(1).sum(dim=1, keepdim=True))

    def reconstruction(self, aggregate: Tensor, targets: Tensor) -> Tensor:
        """Return L_recon of the decoder's output."""
        output = self.decoder(aggregate)[:, 0]
        if self.task == "binary":
            return F.binary_cross_entropy_with_logits(output, targets)
        return F.mse_loss(output, targets)

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train discriminator and decoder; return the parties' gradient."""
        targets = (labels - self.center) / self.scale
        real = targets.unsqueeze(1)
        real = real + self.sigma * torch.randn_like(real)
        fixed = self.aggregate(embedding.detach())
        ascend(self.discriminator, self._climber, real, fixed, self.clip)
        descend_on(self._descender, self.reconstruction(fixed, targets))
        made = self.aggregate(embedding)
        gan = gan_loss(self.discriminator, real, made)
        recon = self.reconstruction(made, targets)
        on_gan, on_recon = (1.0, self.gamma) if self.literal else (self.gamma, 1.0)
        parts = {
            "gan": gradient_of(on_gan * gan, embedding),
            "recon": gradient_of(on_recon * recon, embedding),
        }
        self.gradient_parts = parts
        metrics = {
            f"{name}_gradient": float(g.abs().mean()) for name, g in parts.items()
        }
        metrics |= {
            "gan_loss": float(gan.detach()),
            "recon_loss": float(recon.detach()),
        }
        loss = (on_gan * gan + on_recon * recon).detach()
        return Outcome(loss, parts["gan"] + parts["recon"], metrics)

    def predict(self, embedding: Tensor) -> Tensor:
        """Return the probability of class 1, or values in the labels' own unit."""
        output: Tensor = self.decoder(self.aggregate(embedding))[:, 0]
        if self.task == "binary":
            return torch.sigmoid(output)
        return output * self.scale + self.center

    def encode(self, labels: Tensor) -> Tensor:
        """Return float labels."""
        if self.task == "binary":
            return class_numbers(labels, 2)
        return finite_numbers(labels).float()
