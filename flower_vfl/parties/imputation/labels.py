"""What the label party trains on for rows of the union whose labels it does not hold.

Sun et al., FLORIST, section 3.1 and appendix H. https://arxiv.org/abs/2106.05508

``majority`` and ``minority`` take one class for all such rows, ``random_pos`` draws by
the frequencies of the own labels, ``random_pred`` by the model's own prediction, and
``neighbors`` takes the vote of the most similar labelled rows of the batch.

Draws come from a secret of the label party. ``random_pos`` draws once for each row: a
label that changes from one epoch to the next turns its gradient around, and a passive
party would see that no real label does so. ``random_pred`` draws at every visit,
because only then synthetic labels change nothing on average (appendix H).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task
from flower_vfl.specs import build_from_spec

from .draws import (
    class_counts,
    draw_predicted,
    majority_class,
    minority_class,
    nearest_labels,
    vote,
)

CLASSES: tuple[Task, ...] = ("binary", "multiclass")
ALL_TASKS: tuple[Task, ...] = (*CLASSES, "regression")


@dataclass
class Lacking:
    """A batch some of whose labels are missing."""

    rows: Tensor
    labels: Tensor
    absent: Tensor
    predict: Callable[[], Tensor]
    join: Callable[[], Tensor]
    generator: torch.Generator

    @cached_property
    def known(self) -> Tensor:
        """Positions of the labels that are there."""
        mask = torch.ones(len(self.labels), dtype=torch.bool, device=self.rows.device)
        return mask.index_fill(0, self.absent, False).nonzero().flatten()


class LabelFill(ABC):
    """Makes labels for rows that have none."""

    tasks: ClassVar[tuple[Task, ...]] = CLASSES
    samples: int = 1  # with more than one, labels are shares of classes

    def __init__(self) -> None:
        self.own = torch.empty(0)  # labels of the own training rows
        self.classes = 2

    def fit(
        self, own: Tensor, classes: int, rows: int, generator: torch.Generator
    ) -> None:
        """Take note of the own labels; called before the first batch."""
        self.own, self.classes = own, classes

    @abstractmethod
    def fill(self, batch: Lacking) -> Tensor:
        """Return labels for the rows that lack one."""

    def shares_of(self, frequencies: Tensor) -> Tensor | None:
        """Return the share of each class among synthetic labels; None if it depends."""
        return None


class Majority(LabelFill):
    """The most frequent class of the own labels."""

    def _number(self) -> int:
        return majority_class(class_counts(self.own, self.classes))

    def fill(self, batch: Lacking) -> Tensor:
        """Return that class for every row."""
        return torch.full_like(batch.labels[batch.absent], self._number())

    def shares_of(self, frequencies: Tensor) -> Tensor:
        """Return all for that class."""
        return F.one_hot(torch.tensor(self._number()), self.classes).to(frequencies)


class Minority(Majority):
    """The rarest class of the own labels."""

    def _number(self) -> int:
        return minority_class(class_counts(self.own, self.classes))


class RandomPos(LabelFill):
    """A label drawn from the own labels; for two classes, by the positive rate."""

    tasks = ALL_TASKS

    def __init__(self, fixed: bool = True) -> None:
        super().__init__()
        self.fixed = fixed
        self._drawn = torch.empty(0)

    def fit(
        self, own: Tensor, classes: int, rows: int, generator: torch.Generator
    ) -> None:
        """Take note of the own labels, and draw for every row."""
        super().fit(own, classes, rows, generator)
        if self.fixed:
            self._drawn = self._draw(rows, generator)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self.own), (count,), generator=generator)
        return self.own[chosen.to(self.own.device)]

    def fill(self, batch: Lacking) -> Tensor:
        """Return the drawn labels."""
        if self.fixed:
            return self._drawn[batch.rows[batch.absent]]
        return self._draw(len(batch.absent), batch.generator)

    def shares_of(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies themselves."""
        return frequencies


class RandomPred(LabelFill):
    """A label drawn by what the model predicts for the row."""

    def __init__(self, samples: int = 1) -> None:
        super().__init__()
        if samples < 1:
            raise ConfigError(f"samples must be at least 1, got {samples}")
        self.samples = samples

    def fill(self, batch: Lacking) -> Tensor:
        """Return labels, or shares of classes for several draws."""
        predicted = batch.predict()[batch.absent]
        shares = draw_predicted(predicted, self.samples, batch.generator)
        if shares.dim() == 1:
            return shares.to(batch.labels)
        return shares if self.samples > 1 else shares.argmax(dim=1)


class Neighbors(LabelFill):
    """The vote of the labelled rows of the batch with the most similar embeddings.

    For a regression it is their mean. A batch without any label gets labels drawn from
    the own ones.
    """

    tasks = ALL_TASKS

    def __init__(self, k: int = 3) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"k must be at least 1, got {k}")
        self.k = k

    def fill(self, batch: Lacking) -> Tensor:
        """Return the outcome of each vote."""
        if not len(batch.known):
            size = (len(batch.absent),)
            chosen = torch.randint(len(self.own), size, generator=batch.generator)
            return self.own[chosen.to(self.own.device)]
        joined = batch.join()
        nearest = nearest_labels(
            joined[batch.absent],
            joined[batch.known],
            batch.labels[batch.known],
            self.k,
        )
        if not self.classes:
            return nearest.mean(dim=1)
        return vote(nearest, self.classes).to(batch.labels.dtype)


LABEL_STAND_INS: dict[str, Callable[..., LabelFill]] = {
    "majority": Majority,
    "minority": Minority,
    "random_pos": RandomPos,
    "random_pred": RandomPred,
    "neighbors": Neighbors,
}


def build_label_fill(text: str) -> LabelFill:
    """Return a strategy for missing labels by name.

    Parameters
    ----------
    text : str
        A name of :data:`LABEL_STAND_INS`, perhaps with parameters, e.g.
        ``"random_pred:samples=3"``.
    """
    return build_from_spec("stand-in for labels", text, LABEL_STAND_INS)


def refuse_task(imputer: LabelFill, task: Task) -> None:
    """Refuse a strategy that means nothing for a task."""
    if task not in imputer.tasks:
        raise ConfigError(
            f"synthetic labels of the kind {type(imputer).__name__} need classes, and "
            f"this is a {task}; use random_pos, which draws from the own labels, or "
            "neighbors"
        )
