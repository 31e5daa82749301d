"""What an attacker scores: rows in a safe precision, and what it knows beside them.

Products with a matrix of rows are torch's. What is left is a few numbers per row, for
which numpy on the host takes a third of the time (``benchmarks/meter_cost.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task
from flower_vfl.rows import row_norms, to_rows

Array = NDArray[Any]
SMALL = 2**14  # entries; up to here double precision costs next to nothing


def as_rows(gradient: Tensor) -> Tensor:
    """Return a gradient of any shape as a matrix with one row per example.

    Half precision becomes single precision; small gradients become double precision.
    """
    if not gradient.is_floating_point() or gradient.ndim == 0:
        raise ConfigError(
            "a gradient must have one row of floating point numbers per example, got "
            f"{gradient.dtype} of the shape {tuple(gradient.shape)}"
        )
    rows = to_rows(gradient)
    # Every product with a slice of columns is slow.
    return rows.double() if rows.numel() <= SMALL else rows.contiguous()


def finite_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of every row; refuse numbers that are not finite."""
    norms = row_norms(rows)
    if not math.isfinite(float(norms.sum())):
        bad = int((~torch.isfinite(rows)).sum())
        if bad:
            raise ConfigError(f"{bad} numbers of the gradient are missing or infinite")
    return norms


def rows_and_norms(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and their norms, in a precision that distances and cosines need."""
    rows = as_rows(gradient)
    norms = finite_norms(rows)
    single = norms.dtype == torch.float32
    if single and clustered(to_numpy(norms), to_numpy(rows.mean(dim=0))):
        norms = finite_norms(rows.double())
    return rows.to(norms.dtype), norms


def clustered(norms: Array, means: Array) -> Array:
    """Return whether rows are close together and far from zero, of each party.

    Their differences need more digits than single precision has.
    """
    most = 0.99 / norms.shape[-1] * np.square(norms).sum(axis=-1)
    close: Array = np.square(means).sum(axis=-1) > most
    return close


def to_numpy(tensor: Tensor) -> Array:
    """Return a tensor's numbers on the host."""
    array: Array = tensor.cpu().numpy()
    return array


def compare(rows: Tensor, norms: Tensor, vectors: Array) -> tuple[Array, Array, Array]:
    """Return what distances and angles follow from.

    Products (vectors × rows), squared lengths of the vectors, norms of the rows.
    """
    products = to_numpy(torch.from_numpy(vectors).to(rows) @ rows.mT)
    lengths = np.square(vectors).sum(axis=-1, keepdims=True)
    return products, lengths, to_numpy(norms)


def round_scores(scores: Array, largest: float | Array) -> Array:
    """Round scores to a small part of the largest one, so that ties are ties.

    Rows on a line, such as those below a linear top model, have a cosine of ±1, and
    beyond the centers the difference of their distances is constant. Without this, the
    last bit would decide the order of such rows.
    """
    part = grain(largest, scores.dtype)
    rounded: Array = scores / part
    np.rint(rounded, out=rounded)
    rounded *= part
    return rounded


def grain(largest: float | Array, dtype: np.dtype[Any]) -> Array:
    """Return the part of the largest score below which scores are the same."""
    digits = 30 if dtype == np.float64 else 17
    least = np.finfo(dtype).tiny * 2.0**20
    return np.asarray(np.maximum(largest, least) * 2.0**-digits, dtype)


@dataclass(frozen=True)
class GroupedLabels:
    """The labels of a batch, sorted into classes once for all parties and attacks."""

    task: Task
    labels: Tensor
    classes: tuple[int, ...]
    groups: tuple[Array, ...]

    @classmethod
    def read(cls, task: Task, labels: Tensor) -> GroupedLabels:
        """Check labels and sort them into classes."""
        values = to_numpy(labels.detach().reshape(-1))
        if task == "regression":
            if not np.isfinite(values).all():
                raise ConfigError("some labels are missing or infinite")
            return cls(task, torch.from_numpy(values.astype(np.float64)), (), ())
        binary = task == "binary"
        classes = [0, 1] if binary else np.unique(values).tolist()
        found = {c: (values == c).nonzero()[0] for c in classes}
        groups = {int(c): group for c, group in found.items() if len(group)}
        whole = binary or all(c == int(c) >= 0 for c in found if c == c)
        if sum(map(len, groups.values())) != len(values) or not whole:
            wanted = "0 or 1" if binary else "class numbers from 0"
            raise ConfigError(f"labels of a {task} task must be {wanted}")
        codes = values.astype(np.int64)
        if [*groups] != [*range(len(groups))]:
            codes = np.searchsorted([*groups], codes)
        return cls(task, torch.from_numpy(codes), tuple(groups), tuple(groups.values()))

    @property
    def constant(self) -> bool:
        """Whether all labels are the same, so that no attack can be measured."""
        if self.task == "regression":
            return not len(self.labels) or bool((self.labels == self.labels[0]).all())
        return len(self.classes) < 2


@dataclass(frozen=True)
class Known(GroupedLabels):
    """What an attacker knows beside the gradient that it gets.

    Each attack uses a part of it: the norm attack only `norms`, the cosine attack the
    clean gradients of `examples`, the mean attack the class means, which it computes
    from `groups`.

    Parameters
    ----------
    task : {"binary", "multiclass", "regression"}
        What the labels are.
    labels : Tensor
        One per row: a position in `classes`, or the value of a regression.
    classes : tuple[int, ...]
        The classes of the batch in ascending order; none for a regression.
    groups : tuple[NDArray, ...]
        Row numbers of each of these classes.
    norms : Tensor
        The norm of each row of the gradient, computed once for all attacks.
    clean : Tensor
        The gradient before any defense, one row per example.
    embedding : Tensor | None (default: None)
        What the party sent for the same rows, for the attacks that look at it.

    Examples
    --------
    >>> batch = GroupedLabels.read("binary", torch.tensor([0, 1]))
    >>> rows, known = attacker(batch, torch.tensor([[1.0], [2.0]]))
    >>> known.classes, known.norms.tolist(), known.examples
    ((0, 1), [1.0, 2.0], [1])
    """

    norms: Tensor
    clean: Tensor
    embedding: Tensor | None = None

    @cached_property
    def examples(self) -> list[int]:
        """Numbers of the rows whose clean gradient the attacker knows.

        The first one of class 1, or of each class of a multi-class task. A row of zeros
        is passed over if there is another one.
        """
        groups = self.groups[1:] if self.task == "binary" else self.groups
        clean = to_numpy(self.clean)
        return [example(clean, group) for group in groups]


def example(clean: Array, group: Array) -> int:
    """Return the number of the first row of a group that is not all zeros."""
    first = int(group[0])
    if not clean[first].any():
        rows = clean[group].reshape(len(group), -1)
        first = int(group[rows.any(axis=1).argmax()])
    return first


def attacker(
    batch: GroupedLabels,
    gradient: Tensor,
    clean: Tensor | None = None,
    embedding: Tensor | None = None,
) -> tuple[Tensor, Known]:
    """Return the rows that an attacker scores, and what it knows."""
    if len(gradient) != len(batch.labels):
        raise ConfigError(f"got {len(batch.labels)} labels for {len(gradient)} rows")
    if clean is not None and clean.shape != gradient.shape:
        raise ConfigError(
            f"the gradient before the defense has the shape {tuple(clean.shape)}, the "
            f"one after it {tuple(gradient.shape)}"
        )
    rows, norms = rows_and_norms(gradient)
    before = rows if clean is None or clean is gradient else as_rows(clean)
    if embedding is not None and len(embedding) != len(rows):
        raise ConfigError(f"got {len(embedding)} embeddings for {len(rows)} rows")
    sent = None if embedding is None else as_rows(embedding.detach())
    given = batch.task, batch.labels.to(rows.device), batch.classes, batch.groups
    return rows, Known(*given, norms, before, sent)
