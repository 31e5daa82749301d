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

from ..errors import ConfigError
from ..objectives import Task
from ..spec import build_from_spec
from .centers import group_medians
from .evidence import Evidence, Panel
from .kernels import Array, cosines, distance_scores, merge_ties, one_hot
from .scores import top_direction

_LARGE, _ENOUGH = 2**16, 127  # an odd number has a middle
CLASSES: tuple[Task, ...] = ("binary", "multiclass")
ALL_TASKS: tuple[Task, ...] = (*CLASSES, "regression")


class ScoreAttack(ABC):
    """A score attack; its formula is the function of the same name in ``scores``."""

    tasks: ClassVar[tuple[Task, ...]] = ALL_TASKS
    # The rows it knows already get scores that are out of reach, and do not count.
    knows_rows: ClassVar[bool] = False

    def directions(self, seen: Panel) -> list[Array] | None:
        """Return the vectors of each party, k×d, whose products with its rows it needs.

        Parameters
        ----------
        seen : Panel
            The batch as each of P parties sees it.
        """
        return None

    def unsettled(
        self, party: Evidence, lengths: Sequence[float], mean_square: float
    ) -> bool:
        """Change what does not work; say whether to ask for directions once more.

        Parameters
        ----------
        party : Evidence
            One party's batch.
        lengths : Sequence[float]
            Norms of its directions.
        mean_square : float
            Mean of the squared norms of the rows.
        """
        return False

    def alike(self, other: ScoreAttack) -> bool:
        """Return whether one call can score both.

        Parameters
        ----------
        other : ScoreAttack
            Another attack.
        """
        return False

    @abstractmethod
    def scores(self, seen: Panel, lengths: Array, products: Array) -> Array:
        """Return scores of all parties' rows.

        Parameters
        ----------
        seen : Panel
            The batch as each of P parties sees it.
        lengths : Array
            Norms of the directions of A attacks that are alike, P×A×k.
        products : Array
            These directions times the rows, P×A×k×B.

        Returns
        -------
        Array
            P×A×1×B, or P×A×C×B with one row for each class of the batch. For a
            regression P×A×c×B with any number of scores.
        """


class NormAttack(ScoreAttack):
    """The length of the row."""

    def scores(self, seen: Panel, lengths: Array, products: Array) -> Array:
        """Return the norms.

        Parameters
        ----------
        seen, lengths, products
            As for :class:`ScoreAttack`.
        """
        return seen.norms


class CosineAttack(ScoreAttack):
    """The cosine with one known row of class 1, or with one known row of each class."""

    tasks = CLASSES
    knows_rows = True

    def directions(self, seen: Panel) -> list[Array]:
        """Return the known rows.

        Parameters
        ----------
        seen : Panel
            The batch as each party sees it.
        """
        return [
            np.stack([party.clean[i].cpu().numpy() for i in party.known_rows])
            for party in seen.parties
        ]

    def unsettled(
        self, party: Evidence, lengths: Sequence[float], mean_square: float
    ) -> bool:
        """Look for other rows if a known one is zero.

        Parameters
        ----------
        party, lengths, mean_square
            As for :class:`ScoreAttack`.
        """
        return min(lengths) == 0.0 and party.know_other_rows()

    def scores(self, seen: Panel, lengths: Array, products: Array) -> Array:
        """Return the cosines; 2 for a known row of the class, −2 for one of another.

        Parameters
        ----------
        seen, lengths, products
            As for :class:`ScoreAttack`.
        """
        found = cosines(seen.norms, products, lengths)
        for party, own in zip(seen.parties, found[:, 0], strict=True):
            known = party.known_rows
            if len(known) > 1:
                own[:, known] = -2.0
            own[range(len(known)), known] = 2.0
        return found


class MeanAttack(ScoreAttack):
    """How much nearer a row is to the mean of its class than to the others.

    Parameters
    ----------
    hard : bool (default: False)
        Score 1 for the nearest class and 0 for the others, as the papers do.
    held_out : bool (default: False)
        Score each half of the batch with the means of the other half. Otherwise the
        means contain the rows that are scored, and where gradients are wide and batches
        small the attack finds a leak even in noise.
    """

    tasks = CLASSES

    def __init__(self, hard: bool = False, held_out: bool = False) -> None:
        self.hard = hard
        self.held_out = held_out

    def directions(self, seen: Panel) -> list[Array]:
        """Return the mean of each class, or of two halves of each class.

        Parameters
        ----------
        seen : Panel
            The batch as each party sees it.
        """
        if not self.held_out:
            return [party.means for party in seen.parties]
        labels = seen.labels
        weights, sizes = labels.half_weights, [len(half) for half in labels.halves]
        return [p.group_means(weights, np.array(sizes)) for p in seen.parties]

    def unsettled(
        self, party: Evidence, lengths: Sequence[float], mean_square: float
    ) -> bool:
        """Ask for more digits if the rows are close together and far from zero.

        Parameters
        ----------
        party, lengths, mean_square
            As for :class:`ScoreAttack`.
        """
        return min(lengths) ** 2 > 0.9 * mean_square and party.widen_if_clustered()

    def alike(self, other: ScoreAttack) -> bool:
        """Return whether the other one also compares distances, in the same way.

        Parameters
        ----------
        other : ScoreAttack
            Another attack.
        """
        return (
            isinstance(other, MeanAttack)
            and self.hard == other.hard
            and self.held_out == other.held_out
        )

    def scores(self, seen: Panel, lengths: Array, products: Array) -> Array:
        """Return differences of distances.

        Parameters
        ----------
        seen, lengths, products
            As for :class:`ScoreAttack`.
        """
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
    """As the mean attack, with the median of every coordinate.

    Parameters
    ----------
    hard, held_out
        As for :class:`MeanAttack`.
    sample : int | Literal["auto"] | None (default: "auto")
        Take the medians of at most that many rows of each class, evenly spaced; None
        takes all rows. Medians are what costs most in a leakage meter: ``"auto"`` takes
        all rows of a gradient of up to 65536 entries and 127 rows of a larger one.
    """

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

    def directions(self, seen: Panel) -> list[Array]:
        """Return the medians of each class, or of two halves of each class.

        Parameters
        ----------
        seen : Panel
            The batch as each party sees it.
        """
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

    def directions(self, seen: Panel) -> list[Array]:
        """Return the direction.

        Parameters
        ----------
        seen : Panel
            The batch as each party sees it.
        """
        return [top_direction(p.rows)[None].cpu().numpy() for p in seen.parties]

    def scores(self, seen: Panel, lengths: Array, products: Array) -> Array:
        """Return the distances.

        Parameters
        ----------
        seen, lengths, products
            As for :class:`ScoreAttack`.
        """
        signed: Array = products - products.mean(axis=-1, keepdims=True)
        return signed if seen.labels.task == "regression" else np.abs(signed)


class DirectAttack(ScoreAttack):
    """The labels as the gradient of summed logits, p − y, shows them.

    For a regression every column of the gradient is a score.

    Parameters
    ----------
    hard : bool (default: True)
        Score 1 for the class whose entry is negative and 0 for the others; False
        scores −g.
    """

    def __init__(self, hard: bool = True) -> None:
        self.hard = hard

    def scores(self, seen: Panel, lengths: Array, products: Array) -> Array:
        """Return the negative gradient, or the choice that it amounts to.

        Parameters
        ----------
        seen, lengths, products
            As for :class:`ScoreAttack`.
        """
        read = [self._read(party) for party in seen.parties]
        most = max(len(scores) for scores in read)  # of a regression: one per column
        # A score that is always zero says nothing, and does not count.
        filled = [np.pad(own, ((0, most - len(own)), (0, 0))) for own in read]
        return np.stack(filled)[:, None]

    def _read(self, seen: Evidence) -> Array:
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
    """Build an attack, and refuse one that means nothing for a task.

    Parameters
    ----------
    spec : str
        A name of :data:`SCORE_ATTACKS` and perhaps parameters, e.g.
        ``"mean:hard=true"``.
    task : {"binary", "multiclass", "regression"}
        What the labels are.
    """
    attack = build_from_spec("score attack", spec, SCORE_ATTACKS)
    if task not in attack.tasks:
        raise ConfigError(
            f"the score attack '{spec}' needs classes, the task is {task}; choose from "
            f"{', '.join(DEFAULT_ATTACKS[task])}"
        )
    return attack
