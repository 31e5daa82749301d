"""GAFM: GAN-based Vertical Federated Learning for Label Protection."""

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
from .base import Objective, OptimizerFactory, Outcome, Task, class_numbers

Parts = Literal["both", "gan", "ce"]
_NEWEST = 0.1  # weight of the newest batch in the running class means


def randomized_response(labels: Tensor, shift: Tensor, classes: int = 2) -> Tensor:
    """Return ỹ of equation 4: even odds, shifted towards the label."""
    if classes == 2:
        return 0.5 + torch.where(labels > 0.5, shift, -shift)
    own = F.one_hot(labels.long(), classes).to(shift.dtype)
    step = (own * classes - 1.0) / (classes - 1)  # 1 for the label, −1/(C−1) else
    return 1.0 / classes + shift.unsqueeze(1) * step


def class_logits(embedding: Tensor, classes: int) -> Tensor:
    """Return the mean (B, C) of the logits that an embedding has several times over."""
    return embedding.reshape(len(embedding), -1, classes).mean(dim=1)


def response_loss(embedding: Tensor, response: Tensor, squashed: bool = True) -> Tensor:
    """Return L_CE of equation 5: cross entropy of the embedding against ỹ."""
    if response.dim() == 2:
        logits = class_logits(embedding, response.shape[1])
        return -(response * F.log_softmax(logits, dim=1)).sum(dim=1).mean()
    if squashed:
        return F.binary_cross_entropy(embedding.mean(dim=1), response)
    if embedding.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(embedding[:, 0], response)
    return F.binary_cross_entropy(torch.sigmoid(embedding).mean(dim=1), response)


def unit_length(gradient: Tensor) -> Tensor:
    """Return a gradient divided by the norm of the whole batch; zeros stay zeros."""
    largest = gradient.abs().max()
    if not largest > 0.0:
        return torch.zeros_like(gradient)
    scaled = gradient / largest  # squares of small numbers would vanish
    norm: Tensor = torch.linalg.vector_norm(scaled)
    return scaled / norm


def match_columns(means: Tensor) -> list[int]:
    """Return for each class the generator's column that stands for it.

    The largest mean is matched first, then the largest of the classes and columns
    that are left.
    """
    left = means.detach().double().cpu().clone()
    chosen = [0] * len(left)
    for _ in range(len(left)):
        row, column = divmod(int(left.argmax()), left.shape[1])
        chosen[row] = column
        left[row, :] = -torch.inf
        left[:, column] = -torch.inf
    return chosen


class ClassGenerator(nn.Module):
    """The generator of several classes: softmax of f's own logits plus what it learns.

    The GAN part knows the distribution of the labels only, and of several classes any
    order fits it. f's columns stand for the classes, because L_CE pulls them there;
    with f's logits in its output, so do the generator's from the start.
    """

    def __init__(self, width: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.classes = classes
        self.learned = nn.Sequential(
            nn.Linear(width, hidden), nn.LeakyReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, embedding: Tensor) -> Tensor:
        """Return points of the simplex (B, classes)."""
        logits = class_logits(embedding, self.classes) + self.learned(embedding)
        return torch.softmax(logits, dim=1)


class GAFM(Objective):
    """GAN-based Vertical Federated Learning for Label Protection.

    There is no top model. A generator turns the joined embedding f into a prediction;
    a discriminator compares the distribution of predictions with that of the labels.
    Per batch, the discriminator climbs L_GAN = E[D(y+ε)] − E[D(G(f))] and its weights
    are clipped; the generator descends it; the parties receive
    γ·∇L_GAN/‖∇L_GAN‖ + ∇L_CE/‖∇L_CE‖, both norms those of the whole batch. L_CE pulls
    f itself towards a randomised response: 0.5 + u for class 1 and 0.5 − u for class 0,
    u from U(0, Δ).

    The paper says "1-layer" of generator and discriminator: here one hidden layer. It
    writes a sigmoid around f in L_CE, and its local models already end in one: here
    there is one sigmoid and not two (see `squashed`). With several parties join the
    embeddings by their mean. The GAN part knows the labels' distribution only, so the
    generator may learn a decreasing map: which way round it predicts is fixed on
    the training labels, by the running mean of its output in each class.

    More than two classes are ours; the paper leaves them to future work. The generator
    then ends in a softmax (:class:`ClassGenerator`), the discriminator takes points of
    the simplex, and f must have a multiple of as many columns as there are classes. It
    takes a large Δ to learn ten of them. GAFM gives no guarantee: measure what leaks.

    Parameters
    ----------
    width : int
        Columns of the joined embedding.
    classes : int (default: 2)
        Number of classes.
    delta : float (default: 0.05)
        Δ, from 0 (the CE part knows nothing of the labels) to 1 − 1/classes.
    gamma : float (default: 1.0)
        γ, the weight of the GAN part.
    sigma : float (default: 0.01)
        Standard deviation of the noise ε on the labels that the discriminator sees.
    clip : float (default: 0.1)
        c: the discriminator's weights stay within ±c.
    hidden : int (default: 16)
        Units of the hidden layer of generator and discriminator.
    parts : {"both", "gan", "ce"} (default: "both")
        What the parties receive; ``"gan"`` and ``"ce"`` are the paper's ablations.
    squashed : bool (default: True)
        Whether the parties' models end in a sigmoid, as the paper's do on Spambase and
        IMDB. Plays no role with more than two classes.

    Attributes
    ----------
    gradient_parts : dict[str, Tensor]
        The two parts of the last gradient, ``"gan"`` (times γ) and ``"ce"``, for the
        paper's Figure 2. They stay with the label party.
    """

    def __init__(
        self,
        width: int,
        classes: int = 2,
        delta: float = 0.05,
        gamma: float = 1.0,
        sigma: float = 0.01,
        clip: float = 0.1,
        hidden: int = 16,
        parts: Parts = "both",
        squashed: bool = True,
    ) -> None:
        super().__init__()
        check_settings(gamma, sigma, clip)
        _check(width, classes, delta, hidden, parts)
        self.task: Task = "binary" if classes == 2 else "multiclass"
        self.width, self.classes, self.hidden = width, classes, hidden
        self.delta, self.gamma, self.sigma, self.clip = delta, gamma, sigma, clip
        self.parts: Parts = parts
        self.squashed = squashed
        columns = 1 if classes == 2 else classes
        self.generator: nn.Module = ClassGenerator(width, classes, hidden)
        if classes == 2:
            self.generator = nn.Sequential(
                nn.Linear(width, hidden),
                nn.LeakyReLU(),
                nn.Linear(hidden, 1),
                nn.Sigmoid(),
            )
        self.discriminator = nn.Sequential(
            nn.Linear(columns, hidden),
            nn.LeakyReLU(),
            nn.Linear(hidden, 1),
            nn.LeakyReLU(),
        )
        # Running mean of the generator's output in each class, and whether there is one
        self.means: Tensor
        self.known: Tensor
        self.register_buffer("means", torch.zeros(classes, columns))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))
        self.gradient_parts: dict[str, Tensor] = {}
        self._climber: Optimizer | None = None
        self._descender: Optimizer | None = None

    def configure(self, make: OptimizerFactory) -> None:
        """Create one optimizer for the discriminator and one for the generator."""
        self._climber = optimizer_of(self.discriminator, make)
        self._descender = optimizer_of(self.generator, make)
        both = (self._climber, self._descender)
        self.optimizers = [made for made in both if made is not None]

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train discriminator and generator; return the parties' gradient."""
        clear = self._points(labels)
        real = clear + self.sigma * torch.randn_like(clear)
        shift = self.delta * torch.rand(len(clear), device=clear.device)
        response = randomized_response(labels, shift, self.classes)
        with torch.no_grad():
            fake = self.generator(self._flat(embedding))
        ascend(self.discriminator, self._climber, real, fake, self.clip)
        fixed = self._flat(embedding.detach())
        loss = gan_loss(self.discriminator, real, self.generator(fixed))
        descend_on(self._descender, loss)
        self._orient(fixed, labels)
        flat = self._flat(embedding)
        gan = gan_loss(self.discriminator, real, self.generator(flat))
        ce = response_loss(self._within(flat), response, self.squashed)
        return self._outcome(embedding, gan, ce)

    def _outcome(self, embedding: Tensor, gan: Tensor, ce: Tensor) -> Outcome:
        """Weigh the two gradients as the ablation says; report their sizes."""
        raw_gan, raw_ce = gradient_of(gan, embedding), gradient_of(ce, embedding)
        parts = {"gan": self.gamma * unit_length(raw_gan), "ce": unit_length(raw_ce)}
        self.gradient_parts = parts
        gradient = parts["gan"] + parts["ce"]
        if self.parts != "both":
            gradient = parts[self.parts]
        products = (unit_length(raw_gan) * parts["ce"]).sum()
        numbers = {
            "gan_loss": gan,
            "ce_loss": ce,
            "gan_gradient": parts["gan"].abs().mean(),
            "ce_gradient": parts["ce"].abs().mean(),
            "parts_cosine": products,  # below 0 where they disturb each other
        }
        # Sizes only: means by class would tell the server what the defense hides.
        metrics = {name: float(value.detach()) for name, value in numbers.items()}
        return Outcome((self.gamma * gan + ce).detach(), gradient.detach(), metrics)

    def _points(self, labels: Tensor) -> Tensor:
        """Return the labels as the discriminator takes them."""
        if self.classes == 2:
            return labels.float().unsqueeze(1)
        return F.one_hot(labels.long(), self.classes).float()

    def _flat(self, embedding: Tensor) -> Tensor:
        flat = embedding.flatten(1)
        if flat.shape[1] != self.width:
            raise ConfigError(
                f"GAFM was made for {self.width} columns of the joined embedding and "
                f"got {flat.shape[1]}"
            )
        return flat

    def _within(self, flat: Tensor) -> Tensor:
        """Refuse embeddings that no sigmoid made, where one should have."""
        if self.squashed and self.classes == 2:
            low, high = torch.aminmax(flat.detach())
            if low < 0.0 or high > 1.0:
                raise ConfigError(
                    f"GAFM expects embeddings between 0 and 1, got {low:g} to "
                    f"{high:g}: end the bottom models in a sigmoid and join them by "
                    "their mean or side by side, or set squashed=False"
                )
        return flat

    @torch.no_grad()
    def _orient(self, fixed: Tensor, labels: Tensor) -> None:
        """Keep the running mean of the generator's output in each class."""
        output = self.generator(fixed)
        members = F.one_hot(labels.long(), self.classes).to(output.dtype)
        counts = members.sum(dim=0)
        fresh = members.T @ output / counts.clamp_min(1.0).unsqueeze(1)
        weight = torch.where(self.known, _NEWEST, 1.0) * (counts > 0)
        self.means += weight.unsqueeze(1) * (fresh - self.means)
        self.known |= counts > 0

    def predict(self, embedding: Tensor) -> Tensor:
        """Return the generator's output, the right way round."""
        output: Tensor = self.generator(self._flat(embedding))
        if self.classes > 2:
            return output[:, match_columns(self.means)]
        decreasing = bool(self.means[1, 0] < self.means[0, 0])
        return 1.0 - output[:, 0] if decreasing else output[:, 0]

    def encode(self, labels: Tensor) -> Tensor:
        """Return float labels (binary) or class numbers (multi-class)."""
        return class_numbers(labels, self.classes)


def _check(width: int, classes: int, delta: float, hidden: int, parts: str) -> None:
    if width < 1 or hidden < 1:
        raise ConfigError(f"width and hidden must be at least 1, got {width}, {hidden}")
    if classes < 2:
        raise ConfigError(f"GAFM needs at least 2 classes, got {classes}")
    if classes > 2 and width % classes:
        raise ConfigError(
            f"GAFM for {classes} classes needs an embedding of {classes} columns, or "
            f"a multiple of them, got {width}; set the width of the cut layer"
        )
    if not 0.0 <= delta <= 1.0 - 1.0 / classes:
        raise ConfigError(
            f"delta must be from 0 to {1.0 - 1.0 / classes:g} for {classes} classes, "
            f"got {delta}"
        )
    if parts not in ("both", "gan", "ce"):
        raise unknown_name("part of GAFM", parts, ("both", "gan", "ce"))
