"""Generative Adversarial Federated Model (ICLR 2023 submission): GAFM's first form.

https://openreview.net/forum?id=94bybXmOLz-
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, check_name, require

from .base import Outcome, Task, class_numbers, finite_numbers
from .gafm import AdversarialObjective, gan_loss, gradient_of

GAMMA = 10.0  # on the mean of L_GAN over the rows
PRINTED = {"binary": 300.0, "regression": 800.0}  # on L_recon, in the paper


class GAFMOriginal(AdversarialObjective):
    """Generative Adversarial Federated Model, the paper's first form.

    Every party sends a prediction of one column. Ŷ is the LeakyReLU of their sum, for a
    regression the sum itself (further columns are summed too). A decoder M, one linear
    layer, makes the prediction. The discriminator D, one linear layer with a LeakyReLU,
    compares Ŷ with noisy labels. In each step D ascends L_GAN = E[D(Y+ε)] − E[D(Ŷ)] and
    its weights are clipped, M descends L_recon (binary cross entropy or squared error),
    and the parties receive the gradient of γ·L_GAN + L_recon.

    The paper prints L_GAN + γ·L_recon with γ = 300 (`literal`), which protects nothing
    if L_GAN is a mean over rows. Summed over N rows, as in the authors' later code, it
    is the default form with a weight of N/γ. GAFM gives no guarantee: the order of
    gradients by their distance from the class means often still reveals every label.

    Parameters
    ----------
    task : {"binary", "regression"} (default: "binary")
        Kind of labels.
    gamma : float | None (default: None)
        γ; None is 10. With `literal` None is the paper's 300, for a regression 800.
    sigma, clip : float (default: 1.0, 0.01)
        Standard deviation of the noise ε on the labels (the paper tries 0.25, 1 and 3)
        and bound on the discriminator's weights.
    literal : bool (default: False)
        Put γ on L_recon, as the paper prints it.
    center, scale : float (default: 0.0, 1.0)
        As for :class:`MeanSquaredError`, for a regression.

    Attributes
    ----------
    gradient_parts : dict[str, Tensor]
        The two parts of the last gradient, each with its weight.

    Examples
    --------
    >>> from functools import partial
    >>> from flower_vfl.objectives import GAFMOriginal
    >>> objective = GAFMOriginal("regression", gamma=2.0)
    >>> objective.configure(partial(torch.optim.SGD, lr=0.1))
    >>> embedding = torch.rand(8, 1, requires_grad=True)
    >>> outcome = objective.step(embedding, torch.rand(8))
    >>> sorted(objective.gradient_parts)
    ['gan', 'recon']
    """

    predicts: ClassVar[str] = "decoder"

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
        check_name("task of GAFMOriginal", task, PRINTED)
        usual = PRINTED[task] if literal else GAMMA
        super().__init__(usual if gamma is None else gamma, sigma, clip)
        self.task: Task = task
        require(scale > 0.0, "scale", "positive", scale)
        if task == "binary" and (center, scale) != (0.0, 1.0):
            raise ConfigError("center and scale are for a regression; leave them out")
        self.literal = literal
        self.center: Tensor
        self.scale: Tensor
        self.register_buffer("center", torch.tensor(center))
        self.register_buffer("scale", torch.tensor(scale))
        self.decoder = nn.Linear(1, 1)
        self.discriminator = nn.Sequential(nn.Linear(1, 1), nn.LeakyReLU())

    def aggregate(self, embedding: Tensor) -> Tensor:
        """Return Ŷ (B, 1) of the summed columns."""
        summed = embedding.flatten(1).sum(dim=1, keepdim=True)
        return F.leaky_relu(summed) if self.task == "binary" else summed

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
        real = real + self.sigma * self.own_noise().normal(real.shape).to(real)
        fixed = self.aggregate(embedding.detach())
        self.train_discriminator(real, fixed)
        self.train_predictor(self.reconstruction(fixed, targets))
        made = self.aggregate(embedding)
        gan = gan_loss(self.discriminator, real, made)
        recon = self.reconstruction(made, targets)
        on_gan, on_recon = (1.0, self.gamma) if self.literal else (self.gamma, 1.0)
        losses = {"gan": on_gan * gan, "recon": on_recon * recon}
        parts = {name: gradient_of(loss, embedding) for name, loss in losses.items()}
        self.gradient_parts = parts
        found = {f"{name}_gradient": part.abs().mean() for name, part in parts.items()}
        found |= {"gan_loss": gan, "recon_loss": recon}
        metrics = {name: float(value.detach()) for name, value in found.items()}
        loss = (losses["gan"] + losses["recon"]).detach()
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
