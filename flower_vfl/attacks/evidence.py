"""One batch as an attack sees it: rows of gradients, and labels to score against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..objectives import Task
from .centers import group_means, row_numbers
from .kernels import Array
from .scores import as_rows, row_norms, within_range


@dataclass(frozen=True)
class BatchLabels:
    """The labels of a batch, sorted into classes once for all parties and attacks.

    Parameters
    ----------
    task : {"binary", "multiclass", "regression"}
        What the labels are.
    values : Tensor
        One label per row.
    classes : tuple[int, ...]
        The classes that occur; none for a regression.
    groups : tuple[Tensor, ...]
        Row numbers of each of these classes.
    """

    task: Task
    values: Tensor
    classes: tuple[int, ...]
    groups: tuple[Tensor, ...]

    @classmethod
    def read(cls, task: Task, labels: Tensor, device: torch.device) -> BatchLabels:
        """Sort labels into classes.

        Parameters
        ----------
        task : {"binary", "multiclass", "regression"}
            What the labels are.
        labels : Tensor
            One label per row.
        device : torch.device
            Where the gradients are.
        """
        values = labels.detach().reshape(-1).to(device)
        if task == "regression":
            if not bool(torch.isfinite(values).all()):
                raise ConfigError("some labels are missing or infinite")
            return cls(task, values.double(), (), ())
        binary = task == "binary"
        classes = [0, 1] if binary else torch.unique(values).tolist()
        groups = [row_numbers(values == c) for c in classes]
        counted = sum(group.shape[0] for group in groups)
        if counted != values.shape[0] or min(classes, default=0) < 0:
            wanted = "0 or 1" if binary else "class numbers from 0"
            raise ConfigError(f"labels of a {task} task must be {wanted}")
        found = [i for i, group in enumerate(groups) if group.shape[0]]
        present = tuple(classes[i] for i in found)
        return cls(task, values, present, tuple(groups[i] for i in found))

    @property
    def degenerate(self) -> bool:
        """Whether the batch has one class only, or one value."""
        if self.task == "regression":
            return not len(self.values) or bool((self.values == self.values[0]).all())
        return len(self.classes) < 2

    @cached_property
    def one_hot(self) -> Tensor:
        """Which rows are of which class, C×B."""
        return torch.stack([self.values == c for c in self.classes])

    @property
    def known_groups(self) -> tuple[Tensor, ...]:
        """The classes of which the cosine attack knows a row."""
        return self.groups[1:] if self.task == "binary" else self.groups

    @cached_property
    def first_rows(self) -> list[int]:
        """Number of the first row of each of these classes."""
        return [int(group[0]) for group in self.known_groups]

    @cached_property
    def weights(self) -> Tensor:
        """The same as numbers."""
        return self.one_hot.float()

    @cached_property
    def sizes(self) -> Tensor:
        """Number of rows of each class, C×1."""
        sizes = [[float(group.shape[0])] for group in self.groups]
        return torch.tensor(sizes, device=self.values.device)

    @cached_property
    def halves(self) -> tuple[Tensor, ...]:
        """The first half of each class, then the second half of each class."""
        first = tuple(group[0::2] for group in self.groups)
        second = tuple(g[1::2] if len(g) > 1 else g for g in self.groups)
        return first + second

    @cached_property
    def half_weights(self) -> Tensor:
        """Which rows are in which of these halves, 2C×B, as numbers."""
        weights = torch.zeros(
            len(self.halves), len(self.values), device=self.values.device
        )
        for weight, half in zip(weights, self.halves, strict=True):
            weight.index_fill_(0, half, 1.0)
        return weights

    @cached_property
    def in_first_half(self) -> Array:
        """Which rows are in the first half of their class."""
        inside: Array = self.half_weights[: len(self.classes)].any(dim=0).cpu().numpy()
        return inside


class Evidence:
    """What the attacks on one party's gradient share, computed once.

    Parameters
    ----------
    gradient : Tensor
        What the party gets, one row per example.
    labels : BatchLabels
        Labels of these rows.
    clean : Tensor | None (default: None)
        The gradient before the defense, where the one that the cosine attack knows
        comes from; None takes it from the gradient itself.
    """

    def __init__(
        self, gradient: Tensor, labels: BatchLabels, clean: Tensor | None = None
    ) -> None:
        self.rows = as_rows(gradient)
        self.labels = labels
        if self.rows.shape[0] != labels.values.shape[0]:
            raise ConfigError(
                f"got {len(labels.values)} labels for {len(self.rows)} rows"
            )
        if clean is not None and clean.shape != gradient.shape:
            raise ConfigError(
                f"the gradient before the defense has the shape {tuple(clean.shape)}, "
                f"the one after it {tuple(gradient.shape)}"
            )
        self.clean = self.rows if clean is None else as_rows(clean)
        self._known: list[int] | None = None
        self._measure()

    def _measure(self) -> None:
        """Take the norms; go on in double precision if they need it."""
        self.norms: Array = torch.linalg.vector_norm(self.rows, dim=1).cpu().numpy()
        if not self.norms.size or within_range(self.norms.min(), self.norms.max()):
            return
        norms = row_norms(self.rows)  # refuses what is not finite
        self.rows = self.rows.to(norms.dtype)
        self.norms = norms.cpu().numpy()

    @cached_property
    def means(self) -> Tensor:
        """The mean of each class, C×d."""
        return group_means(self.rows, self.labels.weights, self.labels.sizes)

    def widen_if_clustered(self) -> bool:
        """Go on in double precision if rows are close together and far from zero.

        Distances between such rows need more digits than single precision has.
        """
        if self.rows.dtype == torch.float64:
            return False
        offset = float(self.rows.mean(dim=0).square().sum())
        if offset <= 0.99 * float(np.square(self.norms).mean()):
            return False
        self.rows = self.rows.double()
        self.__dict__.pop("means", None)
        self._measure()
        return True

    @property
    def known_rows(self) -> list[int]:
        """Numbers of the rows that the cosine attack knows.

        The first one of class 1, or of each class if there are more than two.
        """
        return self.labels.first_rows if self._known is None else self._known

    def know_other_rows(self) -> bool:
        """Let the cosine attack know rows that are not zero, if there are any."""
        nonzero = self.clean.any(dim=1).int()
        before = self.known_rows
        self._known = [
            int(group[nonzero[group].argmax()]) for group in self.labels.known_groups
        ]
        return self._known != before


class Panel:
    """The same batch as several parties see it.

    Parameters
    ----------
    parties : Sequence[Evidence]
        The batch of each party, all with the same labels.
    """

    def __init__(self, parties: Sequence[Evidence]) -> None:
        self.parties = parties
        self.labels = parties[0].labels
        # Norms of the rows, P×1×1×B.
        self.norms: Array = np.stack([party.norms for party in parties])[:, None, None]

    @cached_property
    def squares(self) -> Array:
        """Squared norms of the rows, P×1×1×B."""
        squares: Array = np.square(self.norms)
        return squares
