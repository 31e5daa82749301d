"""One batch as an attack sees it: rows of gradients, and labels to score against.

Rows stay on their device. Labels, and what is a few numbers per row, are numpy arrays
on the host: for these torch is mostly overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks.scores import as_rows, finite_norms
from flower_vfl.objectives import Task
from flower_vfl.rows import within_range

from .kernels import Array


@dataclass(frozen=True)
class BatchLabels:
    """The labels of a batch, sorted into classes once for all parties and attacks."""

    task: Task
    values: Array
    classes: tuple[int, ...]
    masks: tuple[Array, ...]

    @classmethod
    def read(cls, task: Task, labels: Tensor) -> BatchLabels:
        """Sort labels into classes."""
        values: Array = labels.detach().cpu().numpy().reshape(-1)
        if task == "regression":
            if not np.isfinite(values).all():
                raise ConfigError("some labels are missing or infinite")
            return cls(task, values.astype(np.float64), (), ())
        classes = [0, 1] if task == "binary" else np.unique(values).tolist()
        masks = [values == number for number in classes]
        sizes = [int(np.count_nonzero(mask)) for mask in masks]
        whole = all(
            number == int(number) >= 0 for number in classes if number == number
        )
        if sum(sizes) != len(values) or not whole:
            wanted = "0 or 1" if task == "binary" else "class numbers from 0"
            raise ConfigError(f"labels of a {task} task must be {wanted}")
        found = [i for i, size in enumerate(sizes) if size]
        present = tuple(int(classes[i]) for i in found)
        return cls(task, values, present, tuple(masks[i] for i in found))

    @property
    def degenerate(self) -> bool:
        """Whether the batch has one class only, or one value."""
        if self.task == "regression":
            return not len(self.values) or bool((self.values == self.values[0]).all())
        return len(self.classes) < 2

    @cached_property
    def groups(self) -> tuple[Array, ...]:
        """Row numbers of each class."""
        return tuple(np.flatnonzero(mask) for mask in self.masks)

    @cached_property
    def weights(self) -> Array:
        """Which rows are of which class, C×B, as numbers."""
        return np.stack(self.masks).astype(np.float32)

    @cached_property
    def sizes(self) -> Array:
        """Number of rows of each class."""
        return np.array([len(group) for group in self.groups], dtype=np.float64)

    @cached_property
    def halves(self) -> tuple[Array, ...]:
        """The first half of each class, then the second half of each class."""
        first = tuple(group[0::2] for group in self.groups)
        second = tuple(g[1::2] if len(g) > 1 else g for g in self.groups)
        return first + second

    @cached_property
    def half_weights(self) -> Array:
        """Which rows are in which of these halves, 2C×B, as numbers."""
        weights = np.zeros((len(self.halves), len(self.values)), dtype=np.float32)
        for weight, half in zip(weights, self.halves, strict=True):
            weight[half] = 1.0
        return weights

    @cached_property
    def in_first_half(self) -> Array:
        """Which rows are in the first half of their class."""
        inside: Array = self.half_weights[: len(self.classes)].max(axis=0) > 0.0
        return inside

    @property
    def known_groups(self) -> tuple[Array, ...]:
        """The classes of which the cosine attack knows a row."""
        return self.groups[1:] if self.task == "binary" else self.groups

    @cached_property
    def first_rows(self) -> list[int]:
        """Number of the first row of each of these classes."""
        return [int(group[0]) for group in self.known_groups]


class PartyBatch:
    """What the attacks on one party's gradient share, computed once."""

    def __init__(
        self, gradient: Tensor, labels: BatchLabels, clean: Tensor | None = None
    ) -> None:
        self.rows = as_rows(gradient).contiguous()  # a slice of columns is slow
        self.labels = labels
        if self.rows.shape[0] != len(labels.values):
            raise ConfigError(
                f"got {len(labels.values)} labels for {self.rows.shape[0]} rows"
            )
        if clean is not None and clean.shape != gradient.shape:
            raise ConfigError(
                f"the gradient before the defense has the shape {tuple(clean.shape)}, "
                f"the one after it {tuple(gradient.shape)}"
            )
        self._clean = clean
        self._known: list[int] | None = None
        self._measure()

    def _measure(self) -> None:
        """Take the norms; go on in double precision if they need it."""
        self.norms: Array = torch.linalg.vector_norm(self.rows, dim=1).cpu().numpy()
        if not self.norms.size or within_range(self.norms.min(), self.norms.max()):
            return
        norms = finite_norms(self.rows)  # refuses what is not finite
        self.rows = self.rows.to(norms.dtype)
        self.norms = norms.cpu().numpy()

    @cached_property
    def clean(self) -> Tensor:
        """The rows before the defense."""
        return self.rows if self._clean is None else as_rows(self._clean)

    @cached_property
    def total(self) -> Tensor:
        """The sum of all rows."""
        return self.rows.sum(dim=0)

    @cached_property
    def means(self) -> Array:
        """The mean of each class, C×d."""
        return self.group_means(self.labels.weights, self.labels.sizes)

    def group_means(self, weights: Array, sizes: Array) -> Array:
        """Return the mean of groups of rows."""
        member = torch.from_numpy(weights).to(self.rows)
        means: Array = (member @ self.rows).cpu().numpy()
        means /= sizes[:, None]
        return means

    def widen_if_clustered(self) -> bool:
        """Go on in double precision if rows are close together and far from zero.

        Distances between such rows need more digits than single precision has.
        """
        if self.rows.dtype == torch.float64:
            return False
        offset = float((self.total / len(self.rows)).square().sum())
        if offset <= 0.99 * float(np.square(self.norms).mean()):
            return False
        self.rows = self.rows.double()
        for kept in ("means", "total"):
            self.__dict__.pop(kept, None)
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
        nonzero = self.clean.any(dim=1).cpu().numpy()
        before = self.known_rows
        self._known = [int(g[nonzero[g].argmax()]) for g in self.labels.known_groups]
        return self._known != before


class BatchView:
    """The same batch as several parties see it."""

    def __init__(self, parties: Sequence[PartyBatch]) -> None:
        self.parties = parties
        self.labels = parties[0].labels
        # Norms of the rows, P×1×1×B.
        self.norms: Array = np.stack([party.norms for party in parties])[:, None, None]

    @cached_property
    def squares(self) -> Array:
        """Squared norms of the rows, P×1×1×B."""
        squares: Array = np.square(self.norms)
        return squares
