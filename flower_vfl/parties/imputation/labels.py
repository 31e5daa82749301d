"""Synthetic labels for aligned rows whose labels the label party does not hold.

Sun et al., FLORIST, section 3.1 and appendix H. https://arxiv.org/abs/2106.05508

Draws come from a secret of the label party. ``random_pos`` draws once for each row: a
label that changes between epochs reverses its gradient, and a passive party would see
that no real label does so. ``random_pred`` draws in every epoch, because only then
synthetic labels change nothing on average (appendix H).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.errors import ConfigError, require
from flower_vfl.objectives import Task
from flower_vfl.randomness import Noise


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """Return how many labels each class has."""
    return torch.bincount(labels.long(), minlength=classes)


def minority_class(counts: Tensor) -> int:
    """Return the rarest class that occurs, other than the majority; 1 of 0 and 1."""
    rare = counts.clone()
    rare[rare == 0] = torch.iinfo(rare.dtype).max - 1  # never chosen: no label has it
    rare[counts.argmax()] = torch.iinfo(rare.dtype).max
    return int(rare.argmin())


def draw_predicted(probabilities: Tensor, samples: int, stream: Noise) -> Tensor:
    """Return labels drawn by predicted probabilities, averaged over several draws."""
    chances = probabilities.detach().double().cpu().clamp(0.0, 1.0)
    if chances.dim() == 1:
        draws = stream.uniform((samples, len(chances)), torch.float64)
        shares = (draws < chances).double().mean(dim=0)
    else:
        draws = stream.uniform((len(chances), samples), torch.float64)
        edges = (chances / chances.sum(dim=1, keepdim=True)).cumsum(dim=1)[:, :-1]
        drawn = torch.searchsorted(edges.contiguous(), draws, right=True)
        shares = F.one_hot(drawn, chances.shape[1]).double().mean(dim=1)
    return shares.to(probabilities)


def nearest_labels(embedding: Tensor, known: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return the labels of the k known rows of largest cosine, (B, k)."""
    rows, others = (F.normalize(part.flatten(1), dim=1) for part in (embedding, known))
    nearest = (rows @ others.T).topk(min(k, len(known)), dim=1).indices
    return labels[nearest]


def vote(labels: Tensor, classes: int) -> Tensor:
    """Return the most frequent class of each row; of several that of the nearest."""
    hits = F.one_hot(labels.long(), classes)
    # A tie is decided by who comes first, so weigh the first a little more.
    order = torch.linspace(0.5, 0.0, labels.shape[1], device=labels.device)
    weights = 1.0 + order / max(labels.shape[1], 1)
    return (hits * weights[None, :, None]).sum(dim=1).argmax(dim=1)


@dataclass
class UnlabelledBatch:
    """A batch in which some labels are missing."""

    rows: Tensor
    labels: Tensor
    absent: Tensor  # positions without a label
    predict: Callable[[], Tensor]
    join: Callable[[], Tensor]
    stream: Noise

    @cached_property
    def known(self) -> Tensor:
        """Positions with a label."""
        mask = torch.ones(len(self.labels), dtype=torch.bool, device=self.rows.device)
        return mask.index_fill(0, self.absent, False).nonzero().flatten()


class LabelSynthesizer(ABC):
    """Makes labels for rows that have none."""

    for_values = False  # whether it works for a regression
    samples: int = 1  # with more than one, labels are shares of classes

    def __init__(self) -> None:
        self.own = torch.empty(0)  # labels of the own training rows
        self.classes = 2

    def fit(self, own: Tensor, classes: int, rows: int, stream: Noise) -> None:
        """Set the own labels; called before the first batch."""
        self.own, self.classes = own, classes

    def check_task(self, task: Task) -> None:
        """Refuse a task that it does not work for."""
        if task == "regression" and not self.for_values:
            kind = f"synthetic labels of the kind {type(self).__name__} need classes"
            raise ConfigError(f"{kind}, not a {task}; use random_pos or neighbors")

    @abstractmethod
    def synthesize(self, batch: UnlabelledBatch) -> Tensor:
        """Return labels for the rows that lack one."""

    def class_shares(self, frequencies: Tensor) -> Tensor | None:
        """Return the share of each class among synthetic labels, None if unknown."""
        return None

    def _draw(self, count: int, stream: Noise) -> Tensor:
        chosen = (stream.uniform((count,), torch.float64) * len(self.own)).long()
        return self.own[chosen.to(self.own.device)]


class Majority(LabelSynthesizer):
    """The most frequent class of the own labels."""

    def _number(self) -> int:
        return int(class_counts(self.own, self.classes).argmax())

    def synthesize(self, batch: UnlabelledBatch) -> Tensor:
        """Return that class for every row."""
        return torch.full_like(batch.labels[batch.absent], self._number())

    def class_shares(self, frequencies: Tensor) -> Tensor:
        """Return all for that class."""
        return F.one_hot(torch.tensor(self._number()), self.classes).to(frequencies)


class Minority(Majority):
    """The rarest class of the own labels."""

    def _number(self) -> int:
        return minority_class(class_counts(self.own, self.classes))


class RandomPos(LabelSynthesizer):
    """A label drawn from the own labels; for two classes, by the positive rate."""

    for_values = True

    def __init__(self, fixed: bool = True) -> None:
        super().__init__()
        self.fixed = fixed
        self._drawn = torch.empty(0)

    def fit(self, own: Tensor, classes: int, rows: int, stream: Noise) -> None:
        """Set the own labels, and draw a label for every row."""
        super().fit(own, classes, rows, stream)
        if self.fixed:
            self._drawn = self._draw(rows, stream)

    def synthesize(self, batch: UnlabelledBatch) -> Tensor:
        """Return the drawn labels."""
        if self.fixed:
            return self._drawn[batch.rows[batch.absent]]
        return self._draw(len(batch.absent), batch.stream)

    def class_shares(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies themselves."""
        return frequencies


class RandomPred(LabelSynthesizer):
    """A label drawn by what the model predicts for the row."""

    def __init__(self, samples: int = 1) -> None:
        super().__init__()
        require(samples >= 1, "samples", "at least 1", samples)
        self.samples = samples

    def synthesize(self, batch: UnlabelledBatch) -> Tensor:
        """Return labels, or shares of classes for several draws."""
        predicted = batch.predict()[batch.absent]
        shares = draw_predicted(predicted, self.samples, batch.stream)
        if shares.dim() == 1:
            return shares.to(batch.labels)
        return shares if self.samples > 1 else shares.argmax(dim=1)


class Neighbors(LabelSynthesizer):
    """The vote of the labelled rows of the batch with the most similar embeddings."""

    for_values = True

    def __init__(self, k: int = 3) -> None:
        super().__init__()
        require(k >= 1, "k", "at least 1", k)
        self.k = k

    def synthesize(self, batch: UnlabelledBatch) -> Tensor:
        """Return the outcome of each vote."""
        if not len(batch.known):
            return self._draw(len(batch.absent), batch.stream)
        joined, known = batch.join(), batch.known
        others = joined[known], batch.labels[known]
        nearest = nearest_labels(joined[batch.absent], *others, self.k)
        if not self.classes:
            return nearest.mean(dim=1)
        return vote(nearest, self.classes).to(batch.labels.dtype)


LABEL_SYNTHESIZERS: dict[str, Callable[..., LabelSynthesizer]] = {
    "majority": Majority,
    "minority": Minority,
    "random_pos": RandomPos,
    "random_pred": RandomPred,
    "neighbors": Neighbors,
}
