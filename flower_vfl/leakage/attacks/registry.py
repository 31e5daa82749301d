"""The score attacks by name, in the form in which the leakage meter runs them.

Many attacks on many parties share their work: norms and class means are computed once
per party, all products of the rows with known vectors are one matrix product, and the
scores of all of them are ranked at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import numpy as np

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.kernels import (
    Array,
    cosines,
    distance_scores,
    merge_ties,
    one_hot,
)
from flower_vfl.leakage.party_batch import BatchView, PartyBatch
from flower_vfl.objectives import Task
from flower_vfl.specs import build_from_spec

from .centers import group_medians
from .scores import top_direction

_LARGE, _ENOUGH = 2**16, 127  # an odd number has a middle
CLASSES: tuple[Task, ...] = ("binary", "multiclass")
ALL_TASKS: tuple[Task, ...] = (*CLASSES, "regression")


class ScoreAttack(ABC):
    """A score attack; its formula is the function of the same name in ``scores``."""

    tasks: ClassVar[tuple[Task, ...]] = ALL_TASKS
    # The rows it knows already get scores that are out of reach, and do not count.
    knows_rows: ClassVar[bool] = False

    def directions(self, seen: BatchView) -> list[Array] | None:
        """Return the vectors of each party, k×d, whose products with its rows it needs."""
        return None

    def unsettled(
        self, party: PartyBatch, lengths: Sequence[float], mean_square: float
    ) -> bool:
        """Change what does not work; say whether to ask for directions once more."""
        return False

    def alike(self, other: ScoreAttack) -> bool:
        """Return whether one call can score both."""
        return False

    @abstractmethod
    def scores(self, seen: BatchView, lengths: Array, products: Array) -> Array:
        """Return scores of all parties' rows."""


class NormAttack(ScoreAttack):
    """The length of the row."""

    def scores(self, seen: BatchView, lengths: Array, products: Array) -> Array:
        """Return the norms."""
        return seen.norms


class CosineAttack(ScoreAttack):
    """The cosine with one known row of class 1, or with one known row of each class."""

    tasks = CLASSES
    knows_rows = True

    def directions(self, seen: BatchView) -> list[Array]:
        """Return the known rows."""
        return [
            np.stack([party.clean[i].cpu().numpy() for i in party.known_rows])
            for party in seen.parties
        ]

    def unsettled(
        self, party: PartyBatch, lengths: Sequence[float], mean_square: float
    ) -> bool:
        """Look for other rows if a known one is zero."""
        return min(lengths) == 0.0 and party.know_other_rows()

    def scores(self, seen: BatchView, lengths: Array, products: Array) -> Array:
        """Return the cosines; 2 for a known row of the class, −2 for one of another."""
        found = cosines(seen.norms, products, lengths)
        for party, own in zip(seen.parties, found[:, 0], strict=True):
            known = party.known_rows
            if len(known) > 1:
                own[:, known] = -2.0
            own[range(len(known)), known] = 2.0
        return found


class MeanAttack(ScoreAttack):
    """How much nearer a row is to the mean of its class than to the others."""

    tasks = CLASSES

    def __init__(self, hard: bool = False, held_out: bool = False) -> None:
        self.hard = hard
        self.held_out = held_out

    def directions(self, seen: BatchView) -> list[Array]:
        """Return the mean of each class, or of two halves of each class."""
        if not self.held_out:
            return [party.means for party in seen.parties]
        labels = seen.labels
        weights, sizes = labels.half_weights, [len(half) for half in labels.halves]
        return [p.group_means(weights, np.array(sizes)) for p in seen.parties]

    def unsettled(
        self, party: PartyBatch, lengths: Sequence[float], mean_square: float
    ) -> bool:
        """Ask for more digits if the rows are close together and far from zero."""
        return min(lengths) ** 2 > 0.9 * mean_square and party.widen_if_clustered()

    def alike(self, other: ScoreAttack) -> bool:
        """Return whether the other one also compares distances, in the same way."""
        return (
            isinstance(other, MeanAttack)
            and self.hard == other.hard
            and self.held_out == other.held_out
        )

    def scores(self, seen: BatchView, lengths: Array, products: Array) -> Array:
        """Return differences of distances."""
        if not self.held_out:
            scores = distance_scores(seen.squares, products, lengths)
        else:
            size = len(seen.labels.classes)
            first, second = (
                distance_scores(seen.squares, products[:, :, half], lengths[:, :, half])
                for half in (slice(size), slice(size, None))
            )
            scores = np.where(seen.labels.in_first_half, second, first)
        return one_hot(scores) if self.hard else merge_ties(scores)


class MedianAttack(MeanAttack):
    """As the mean attack, with the median of every coordinate."""

    def __init__(
        self,
        hard: bool = False,
        held_out: bool = False,
        sample: int | Literal["auto"] | None = "auto",
    ) -> None:
        super().__init__(hard, held_out)
        if isinstance(sample, int) and sample < 1:
            raise ConfigError(f"sample must be a number from 1 or none, got {sample}")
        self.sample = sample

    def directions(self, seen: BatchView) -> list[Array]:
        """Return the medians of each class, or of two halves of each class."""
        groups = seen.labels.halves if self.held_out else seen.labels.groups
        rows = [party.rows for party in seen.parties]
        sample = self.sample
        if sample == "auto":
            large = any(part.numel() > _LARGE for part in rows)
            sample = _ENOUGH if large else None
        medians = group_medians(rows, groups, sample)
        ends = np.cumsum([part.shape[1] for part in rows])
        return np.split(medians, ends[:-1], axis=1)


class SpectralAttack(ScoreAttack):
    """How far a row is from the mean along the direction of most variance.

    For a regression it is the signed distance, the first principal component.
    """

    def directions(self, seen: BatchView) -> list[Array]:
        """Return the direction."""
        return [top_direction(p.rows)[None].cpu().numpy() for p in seen.parties]

    def scores(self, seen: BatchView, lengths: Array, products: Array) -> Array:
        """Return the distances."""
        signed: Array = products - products.mean(axis=-1, keepdims=True)
        return signed if seen.labels.task == "regression" else np.abs(signed)


class DirectAttack(ScoreAttack):
    """The labels as the gradient of summed logits, p − y, shows them.

    For a regression every column of the gradient is a score.
    """

    def __init__(self, hard: bool = True) -> None:
        self.hard = hard

    def scores(self, seen: BatchView, lengths: Array, products: Array) -> Array:
        """Return the negative gradient, or the choice that it amounts to."""
        read = [self._read(party) for party in seen.parties]
        most = max(len(scores) for scores in read)  # of a regression: one per column
        # A score that is always zero says nothing, and does not count.
        filled = [np.pad(own, ((0, most - len(own)), (0, 0))) for own in read]
        return np.stack(filled)[:, None]

    def _read(self, seen: PartyBatch) -> Array:
        width, classes = seen.rows.shape[1], seen.labels.classes
        columns: Array = seen.rows.T.cpu().numpy()
        if seen.labels.task == "regression":
            return columns
        scores = -columns
        if seen.labels.task == "binary" and width == 1:
            return (scores > 0).astype(scores.dtype) if self.hard else scores
        if width <= max(classes) or (seen.labels.task == "binary" and width > 2):
            wanted = "1 or 2" if seen.labels.task == "binary" else "one per class"
            raise ConfigError(
                "the direct attack reads the gradient of summed logits, with columns "
                f"{wanted}; this one has {width}"
            )
        scores = one_hot(scores) if self.hard else scores
        if seen.labels.task == "multiclass":
            return scores[list(classes)]
        return scores[1:2] if self.hard else scores[1:2] - scores[0:1]


SCORE_ATTACKS: dict[str, Callable[..., ScoreAttack]] = {
    "norm": NormAttack,
    "cosine": CosineAttack,
    "mean": MeanAttack,
    "median": MedianAttack,
    "spectral": SpectralAttack,
    "direct": DirectAttack,
}
DEFAULT_ATTACKS: dict[Task, tuple[str, ...]] = {
    "binary": ("norm", "cosine", "mean", "median"),
    "multiclass": ("norm", "cosine", "mean", "median"),
    "regression": ("norm", "direct", "spectral"),
}


def build_for(spec: str, task: Task) -> ScoreAttack:
    """Build an attack, and refuse one that means nothing for a task."""
    attack = build_from_spec("score attack", spec, SCORE_ATTACKS)
    if task not in attack.tasks:
        raise ConfigError(
            f"the score attack '{spec}' needs classes, the task is {task}; choose from "
            f"{', '.join(DEFAULT_ATTACKS[task])}"
        )
    return attack
