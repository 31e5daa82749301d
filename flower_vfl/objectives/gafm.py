"""GAN-based Vertical Federated Learning for Label Protection (Han and Guan).

https://arxiv.org/abs/2302.02245
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError, check_name, require

from . import base
from .base import Objective, OptimizerFactory, Outcome, Task, optimizers_of

Parts = Literal["both", "gan", "ce"]
_NEWEST = 0.1  # weight of the newest batch in the running class means
_STEPS = 5  # of the discriminator where it is balanced, as in Wasserstein GAN


def gan_loss(
    discriminator: nn.Module, real: Tensor, fake: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return E[D(real)] − E[D(fake)], the Wasserstein loss of GAFM's equation 3."""
    scores = discriminator(real)
    real_score: Tensor = scores.mean() if weights is None else (weights @ scores).sum()
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

    hides: ClassVar[bool] = True
    predicts: ClassVar[str] = "generator"  # attribute with the network that descends
    discriminator: nn.Module

    def __init__(self, gamma: float, sigma: float, clip: float) -> None:
        super().__init__()
        for name, value in (("gamma", gamma), ("sigma", sigma)):
            possible = 0.0 <= value < float("inf")
            require(possible, name, "a finite number of at least 0", value)
        require(0.0 < clip < float("inf"), "clip", "a finite number above 0", clip)
        self.gamma, self.sigma, self.clip = gamma, sigma, clip
        self.gradient_parts: dict[str, Tensor] = {}
        self._ascent: list[Optimizer] = []
        self._descent: list[Optimizer] = []

    def configure(self, make: OptimizerFactory) -> None:
        """Create one optimizer for the discriminator and one for the predictor."""
        self._ascent = optimizers_of(self.discriminator, make)
        self._descent = optimizers_of(getattr(self, self.predicts), make)
        self.optimizers = self._ascent + self._descent

    def train_discriminator(
        self, real: Tensor, fake: Tensor, weights: Tensor | None = None, steps: int = 1
    ) -> None:
        """Take steps up the GAN loss and clamp the weights to [−clip, clip]."""
        for _ in range(steps if self._ascent else 0):
            loss = -gan_loss(self.discriminator, real, fake, weights)
            base.descend(self._ascent, loss)
            with torch.no_grad():
                for parameter in self.discriminator.parameters():
                    parameter.clamp_(-self.clip, self.clip)

    def train_predictor(self, loss: Tensor) -> None:
        """Take one step down a loss, unless nothing is to be trained."""
        if self._descent:
            base.descend(self._descent, loss)


def randomized_response(labels: Tensor, shift: Tensor, classes: int = 2) -> Tensor:
    """Return ỹ of equation 4: even odds, shifted towards the label."""
    if classes == 2:
        return 0.5 + torch.where(labels > 0.5, shift, -shift)
    own = F.one_hot(labels.long(), classes).to(shift.dtype)
    step = (own * classes - 1.0) / (classes - 1)  # 1 for the label, −1/(C−1) else
    return 1.0 / classes + shift.unsqueeze(1) * step


def class_logits(embedding: Tensor, classes: int) -> Tensor:
    """Return logits (B, C): the mean over the groups of C columns of an embedding."""
    return embedding.reshape(len(embedding), -1, classes).mean(dim=1)


def response_loss(
    embedding: Tensor, response: Tensor, squashed: bool = True, summed: bool = False
) -> Tensor:
    """Return L_CE of equation 5: cross entropy of the embedding against ỹ."""
    if response.dim() == 2:
        return F.cross_entropy(class_logits(embedding, response.shape[1]), response)
    if squashed:
        return F.binary_cross_entropy(embedding.mean(dim=1), response)
    if embedding.shape[1] == 1 or summed:
        return F.binary_cross_entropy_with_logits(embedding.sum(dim=1), response)
    return F.binary_cross_entropy(torch.sigmoid(embedding).mean(dim=1), response)


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Return weights of rows whose sum is 1, and the same for every class present."""
    counts = torch.bincount(labels.long(), minlength=classes)
    return 1.0 / (counts[labels.long()] * torch.count_nonzero(counts))


def unit_length(gradient: Tensor) -> Tensor:
    """Return a gradient divided by the norm of the whole batch; zeros stay zeros."""
    largest = gradient.abs().max()
    if not largest > 0.0:
        return torch.zeros_like(gradient)
    scaled = gradient / largest  # squares of small numbers would vanish
    norm: Tensor = torch.linalg.vector_norm(scaled)
    return scaled / norm


def match_columns(means: Tensor) -> list[int]:
    """Return the generator's column for each class, matching the largest mean first."""
    left = means.detach().double().cpu().clone()
    chosen = [0] * len(left)
    for _ in range(len(left)):
        row, column = divmod(int(left.argmax()), left.shape[1])
        chosen[row] = column
        left[row, :] = -torch.inf
        left[:, column] = -torch.inf
    return chosen


def _network(width: int, hidden: int, columns: int) -> nn.Sequential:
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, columns)
    return nn.Sequential(first, nn.LeakyReLU(), last)


class ClassGenerator(nn.Module):
    """The generator of several classes: softmax of f's logits plus learned logits.

    Any order of classes fits L_GAN. With f's logits in its output the generator follows
    the order of L_CE from the start. One class stands for a binary task.
    """

    def __init__(self, width: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.classes = classes
        self.learned = _network(width, hidden, classes)

    def forward(self, embedding: Tensor) -> Tensor:
        """Return points of the simplex (B, classes)."""
        logits = class_logits(embedding, self.classes) + self.learned(embedding)
        return logits.sigmoid() if self.classes == 1 else torch.softmax(logits, dim=1)


class GAFM(AdversarialObjective):
    """GAN-based Vertical Federated Learning for Label Protection.

    There is no top model. A generator turns the joined embedding f into a prediction,
    and a discriminator compares the distribution of predictions with that of the
    labels. In each step the discriminator ascends L_GAN = E[D(y+ε)] − E[D(G(f))] and
    its weights are clipped, the generator descends L_GAN, and the parties receive
    γ·∇L_GAN/‖∇L_GAN‖ + ∇L_CE/‖∇L_CE‖ with norms over the whole batch. L_CE pulls f
    towards a randomised response: 0.5 + u for class 1 and 0.5 − u for class 0, u from
    U(0, Δ).

    Where the paper is open: the "1-layer" networks have one hidden layer here. The
    paper writes a sigmoid around f in L_CE, and its local models already end in one;
    here there is one (see `squashed`). With several parties, aggregate by the mean. The
    generator may learn a decreasing map, so the training labels orient its predictions,
    by the running mean of its output in each class.

    More than two classes are our extension. The generator then ends in a softmax, and f
    must have a multiple of as many columns as there are classes. Ten classes need a
    large Δ. GAFM gives no guarantee: measure the leakage.

    Parameters
    ----------
    width : int
        Columns of the joined embedding.
    classes : int (default: 2)
        Number of classes.
    delta : float (default: 0.05)
        Δ, from 0 (L_CE does not depend on the labels) to 1 − 1/classes.
    gamma : float (default: 1.0)
        γ, the weight of the GAN part.
    sigma : float (default: 0.01)
        Standard deviation of the noise ε on the labels that the discriminator sees.
    clip : float (default: 0.1)
        Bound on the discriminator's weights.
    hidden : int (default: 16)
        Units of the hidden layer of generator and discriminator.
    parts : {"both", "gan", "ce"} (default: "both")
        Parts of the gradient that the parties receive; ``"gan"`` and ``"ce"`` are the
        paper's ablations.
    squashed : bool (default: True)
        Whether the parties' models end in a sigmoid, as the paper's do on Spambase and
        IMDB. Ignored with more than two classes.
    balanced : bool (default: False)
        Our extension for rare classes: all classes of a batch have the same weight in
        E[D(y+ε)], the discriminator takes 5 steps for each one of the generator, and f
        is added to the generator's logits. Rows of the gradients keep equal weights.
    released : bool (default: False)
        As in the authors' code: two hidden layers of 10 units in the discriminator,
        the parties' gradient is taken through the generator before its step, and where
        no sigmoid is at the cut layer, the sum of a row is its logit in L_CE.

    Attributes
    ----------
    gradient_parts : dict[str, Tensor]
        The two parts of the last gradient, ``"gan"`` (times γ) and ``"ce"``, for the
        paper's Figure 2. They stay with the label party.

    Examples
    --------
    >>> from functools import partial
    >>> from flower_vfl.objectives import GAFM
    >>> objective = GAFM(width=1, delta=0.05, gamma=1.0)
    >>> objective.configure(partial(torch.optim.Adam, lr=1e-4))
    >>> embedding = torch.rand(8, 1, requires_grad=True)
    >>> outcome = objective.step(embedding, objective.encode(torch.arange(8) % 2))
    >>> outcome.gradient.shape, sorted(objective.gradient_parts)
    (torch.Size([8, 1]), ['ce', 'gan'])
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
        balanced: bool = False,
        released: bool = False,
    ) -> None:
        super().__init__(gamma, sigma, clip)
        _check(width, classes, delta, hidden, parts)
        self.task: Task = "binary" if classes == 2 else "multiclass"
        self.width, self.classes, self.hidden = width, classes, hidden
        self.delta, self.squashed, self.balanced = delta, squashed, balanced
        self.parts, self.released = parts, released
        columns = 1 if classes == 2 else classes
        logits = columns if balanced else classes
        self.generator: nn.Module = ClassGenerator(width, logits, hidden)
        if classes == 2 and not balanced:
            self.generator = _network(width, hidden, 1).append(nn.Sigmoid())
        self.discriminator = _network(columns, hidden, 1).append(nn.LeakyReLU())
        if released:
            first, more = _network(columns, 10, 10), (nn.Linear(10, 1), nn.LeakyReLU())
            self.discriminator = nn.Sequential(*first, nn.LeakyReLU(), *more)
        # Running mean of the generator's output in each class, and whether there is one
        self.means: Tensor
        self.known: Tensor
        self.register_buffer("means", torch.zeros(classes, columns))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train discriminator and generator; return the parties' gradient."""
        clear = labels.float().unsqueeze(1)  # as the discriminator takes them
        if self.classes > 2:
            clear = F.one_hot(labels.long(), self.classes).float()
        noise = self.own_noise()
        real = clear + self.sigma * noise.normal(clear.shape).to(clear)
        shift = self.delta * noise.uniform((len(clear),)).to(clear)
        response = randomized_response(labels, shift, self.classes)
        with torch.no_grad():
            fake = self.generator(self._flat(embedding))
        weights = class_weights(labels, self.classes) if self.balanced else None
        self.train_discriminator(real, fake, weights, _STEPS if self.balanced else 1)
        flat, fixed = self._flat(embedding), self._flat(embedding.detach())
        if not self.released:
            self.train_predictor(self._gan(real, fixed, weights))
        gan = self._gan(real, flat, weights)
        ce = response_loss(self._within(flat), response, self.squashed, self.released)
        outcome = self._outcome(embedding, gan, ce)
        if self.released:
            self.train_predictor(gan)
        self._orient(fixed, labels)
        return outcome

    def _gan(self, real: Tensor, flat: Tensor, weights: Tensor | None) -> Tensor:
        return gan_loss(self.discriminator, real, self.generator(flat), weights)

    def _outcome(self, embedding: Tensor, gan: Tensor, ce: Tensor) -> Outcome:
        """Combine the two gradients as `parts` says; report their sizes."""
        raw_gan, raw_ce = gradient_of(gan, embedding), gradient_of(ce, embedding)
        parts = {"gan": self.gamma * unit_length(raw_gan), "ce": unit_length(raw_ce)}
        self.gradient_parts = parts
        gradient = parts["gan"] + parts["ce"]
        if self.parts != "both":
            gradient = parts[self.parts]
        products = (unit_length(raw_gan) * parts["ce"]).sum()
        sizes = {f"{name}_gradient": part.abs().mean() for name, part in parts.items()}
        # The cosine is below 0 where the parts oppose each other.
        numbers = {"gan_loss": gan, "ce_loss": ce, **sizes, "parts_cosine": products}
        # Sizes only: means by class would reveal to the server what GAFM hides.
        metrics = {name: float(value.detach()) for name, value in numbers.items()}
        return Outcome((self.gamma * gan + ce).detach(), gradient.detach(), metrics)

    def _flat(self, embedding: Tensor) -> Tensor:
        flat = embedding.flatten(1)
        if flat.shape[1] != self.width:
            problem = f"GAFM was made for {self.width} columns and got {flat.shape[1]}"
            raise ConfigError(f"{problem}; set width to the columns after aggregation")
        return flat

    def _within(self, flat: Tensor) -> Tensor:
        """Check that embeddings are within [0, 1] where a sigmoid is expected."""
        if self.squashed and self.classes == 2:
            low, high = torch.aminmax(flat.detach())
            if low < 0.0 or high > 1.0:
                raise ConfigError(
                    f"GAFM expects embeddings between 0 and 1, got {low:g} to "
                    f"{high:g}: end the bottom models in a sigmoid and aggregate by "
                    "mean or concatenation, or set squashed=False"
                )
        return flat

    @torch.no_grad()
    def _orient(self, fixed: Tensor, labels: Tensor) -> None:
        """Update the running mean of the generator's output in each class."""
        output = self.generator(fixed)
        members = F.one_hot(labels.long(), self.classes).to(output.dtype)
        counts = members.sum(dim=0)
        fresh = members.T @ output / counts.clamp_min(1.0).unsqueeze(1)
        weight = torch.where(self.known, _NEWEST, 1.0) * (counts > 0)
        self.means += weight.unsqueeze(1) * (fresh - self.means)
        self.known |= counts > 0

    def predict(self, embedding: Tensor) -> Tensor:
        """Return the generator's output, oriented by the training labels."""
        output: Tensor = self.generator(self._flat(embedding))
        if self.classes > 2:
            return output[:, match_columns(self.means)]
        decreasing = bool(self.means[1, 0] < self.means[0, 0])
        return 1.0 - output[:, 0] if decreasing else output[:, 0]

    def encode(self, labels: Tensor) -> Tensor:
        """Return float labels (binary) or class numbers (multi-class)."""
        return base.class_numbers(labels, self.classes)


def _check(width: int, classes: int, delta: float, hidden: int, parts: str) -> None:
    for name, value in (("width", width), ("hidden", hidden)):
        require(value >= 1, name, "at least 1", value)
    require(classes >= 2, "classes", "at least 2", classes)
    if classes > 2 and width % classes:
        problem = f"a multiple of {classes} columns, got {width}"
        raise ConfigError(f"GAFM needs {problem}; set the width of the cut layer")
    most = 1.0 - 1.0 / classes
    allowed = f"from 0 to {most:g} for {classes} classes"
    require(0.0 <= delta <= most, "delta", allowed, delta)
    check_name("part of GAFM", parts, ("both", "gan", "ce"))
