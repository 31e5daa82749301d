"""Similarity-based label inference in split learning.

Liu et al., Similarity-based Label Inference Attack against Training and Inference of
Split Learning, 2022, https://arxiv.org/abs/2203.05222. Rows of one class resemble each
other, in the gradients that a party gets and in the embeddings that it sends. One known
row of each class labels the rows like it; without any, clusters take that place.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.objectives import Task

from .cosine import cosine_attack
from .known import Known, as_rows, to_numpy
from .mean import mean_attack

Distance = Literal["cosine", "euclid"]


def similarity_attack(
    seen: Tensor, examples: Tensor, distance: Distance = "cosine"
) -> Tensor:
    """Return how similar every row is to one known row of each class.

    Parameters
    ----------
    seen, examples : Tensor
        Gradients or embeddings, one row per example; one row for each class.
    distance : Literal["cosine", "euclid"] (default: "cosine")
        How rows are compared.

    Returns
    -------
    Tensor
        One column per class. For two classes one score: how much more similar a row is
        to class 1 than to class 0.

    Examples
    --------
    >>> seen = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> similarity_attack(seen, torch.tensor([[0.0, 3.0], [1.0, 0.0]])).tolist()
    [1.0, -1.0]
    """
    check_name("distance", distance, ("cosine", "euclid"))
    if distance == "euclid":
        return mean_attack(seen, centers=examples)
    columns = cosine_attack(seen, examples)
    return columns[:, 1] - columns[:, 0] if len(examples) == 2 else columns


def cluster_centers(
    seen: Tensor, clusters: int, distance: Distance = "cosine", seed: int = 0
) -> Tensor:
    """Return the centers of k-means, of rows of length 1 for the cosine.

    Parameters
    ----------
    seen : Tensor
        Gradients or embeddings, one row per example.
    clusters : int
        How many there are: the number of classes.
    distance : Literal["cosine", "euclid"] (default: "cosine")
        How rows are compared.
    seed : int (default: 0)
        Of the first centers.

    Examples
    --------
    >>> seen = torch.tensor([[0.0], [0.2], [4.0], [4.2]])
    >>> cluster_centers(seen, 2, "euclid").sort(dim=0)[0].round(decimals=1).tolist()
    [[0.1], [4.1]]
    """
    from sklearn.cluster import KMeans  # a second, which few runs need

    rows = as_rows(seen).double()
    rows = F.normalize(rows, dim=1) if distance == "cosine" else rows
    found = KMeans(clusters, n_init=10, random_state=seed).fit(to_numpy(rows))
    return torch.from_numpy(found.cluster_centers_).to(seen.device)


def assign(guessed: Tensor, labels: Tensor, classes: int) -> list[int]:
    """Return for each class the cluster that holds most of it, no cluster twice.

    Uses the labels: what an attacker finds who names the clusters correctly.
    """
    from scipy.optimize import linear_sum_assignment

    counts = np.zeros((classes, classes))
    np.add.at(counts, (to_numpy(labels), to_numpy(guessed)), 1)
    counts /= np.maximum(counts.sum(axis=1, keepdims=True), 1)  # small classes count
    columns: list[int] = linear_sum_assignment(counts, maximize=True)[1].tolist()
    return columns


@dataclass(frozen=True)
class SimilarityAttack:
    """The similarity attack by name, on all rows of an epoch."""

    distance: Distance = "cosine"
    on: Literal["gradient", "embedding"] = "gradient"
    known: bool = True  # one row of each class, otherwise clusters
    tasks: ClassVar[tuple[Task, ...]] = ("binary", "multiclass")

    def __call__(self, gradient: Tensor, known: Known) -> Tensor:
        """Return one score per row, or one column per class."""
        seen = gradient if self.on == "gradient" else embedding_of(known)
        if not self.known:
            return clustered(seen, known, self.distance)
        present = to_numpy(seen.abs().amax(dim=1) > 0)  # a defense may drop a row
        chosen = [int(g[present[g].argmax()]) for g in known.groups]
        scores = similarity_attack(seen, seen[chosen], self.distance)
        scores[chosen] = scores.mean(dim=0)  # known rows count as guesses
        return scores


def clustered(seen: Tensor, known: Known, distance: Distance = "cosine") -> Tensor:
    """Return how near rows are to the cluster of each class."""
    classes = len(known.classes)
    centers = cluster_centers(seen, classes, distance)
    scores = similarity_attack(seen, centers, distance)
    guessed = (scores > 0).long() if scores.ndim == 1 else scores.argmax(dim=1)
    order = assign(guessed, known.labels, classes)
    if scores.ndim == 1:
        return scores if order == [0, 1] else -scores
    return scores[:, order]


def embedding_of(known: Known) -> Tensor:
    """Return the embeddings that a party sent."""
    if known.embedding is None:
        raise ConfigError("this attack looks at embeddings, which were not given")
    return known.embedding
