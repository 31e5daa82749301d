"""What both forms of GAFM share: networks, the GAN loss and its discriminator."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError

from .base import OptimizerFactory, clear_gradients


def optimizer_of(module: nn.Module, make: OptimizerFactory) -> Optimizer | None:
    """Return an optimizer for a module; None if nothing in it is to be trained."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return make(parameters) if parameters else None


def gan_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Return E[D(real)] − E[D(fake)], the Wasserstein loss of GAFM's equation 3."""
    real_score: Tensor = discriminator(real).mean()
    fake_score: Tensor = discriminator(fake).mean()
    return real_score - fake_score


def clip_weights(module: nn.Module, bound: float) -> None:
    """Clamp every parameter of a module to [−bound, bound]."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-bound, bound)


def ascend(
    discriminator: nn.Module,
    optimizer: Optimizer | None,
    real: Tensor,
    fake: Tensor,
    clip: float,
) -> None:
    """Train the discriminator one step up the GAN loss and clip its weights."""
    if optimizer is None:
        return
    descend_on(optimizer, -gan_loss(discriminator, real, fake))
    clip_weights(discriminator, clip)


def descend_on(optimizer: Optimizer | None, loss: Tensor) -> None:
    """Train what an optimizer holds one step down a loss; None trains nothing."""
    if optimizer is None:
        return
    clear_gradients(optimizer)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def gradient_of(loss: Tensor, embedding: Tensor) -> Tensor:
    """Return the gradient of a loss for the embedding; zeros if it has none."""
    # Two losses may share a part of the graph.
    (gradient,) = torch.autograd.grad(
        loss, embedding, retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(embedding) if gradient is None else gradient


def check_settings(gamma: float, sigma: float, clip: float) -> None:
    """Refuse settings that no form of GAFM can work with."""
    if not 0.0 <= gamma < float("inf"):
        raise ConfigError(f"gamma must be a finite number of at least 0, got {gamma}")
    if not 0.0 <= sigma < float("inf"):
        raise ConfigError(f"sigma must be a finite number of at least 0, got {sigma}")
    if not 0.0 < clip < float("inf"):
        raise ConfigError(f"clip must be a finite number above 0, got {clip}")
