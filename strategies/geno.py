"""LADSG: Label-Anonymized Distillation and Similar Gradient Substitution (Yan et al.).

Its gradient-based evaluation of network outliers (Geno), algorithm 3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.transform import Batch

from .base import Defense, require, row_norms

DEVIATIONS = 6.0  # a norm is too large so many deviations above the median
SMALLEST_DEVIATION = 0.1  # of the median
LARGEST_NORM = 1e300  # leaves room for what norms are multiplied with


def gradient_norm(rows: Tensor) -> float:
    """Return the Euclidean norm of a whole gradient; always finite.

    Parameters
    ----------
    rows : Tensor
        B×d.
    """
    norms = row_norms(rows).clamp_max_(LARGEST_NORM)
    largest = float(norms.max())
    if largest == 0.0:
        return 0.0
    length = largest * float(torch.linalg.vector_norm(norms / largest))
    return min(length, LARGEST_NORM)


def outlier_limit(norms: Iterable[float]) -> float:
    """Return median + 6 MAD of earlier norms, above which a norm is an outlier.

    The median absolute deviation (MAD) counts as at least a tenth of the median, so
    that a history of nearly equal norms does not make an outlier of the next honest
    one: the limit is at least 1.6 medians. If the median is zero there is nothing to
    compare with, and the limit is infinite.

    Parameters
    ----------
    norms : Iterable[float]
        The history, in any order; not empty.
    """
    known = list(norms)
    middle = median(known)
    if middle == 0.0:
        return math.inf
    deviation = median(abs(norm - middle) for norm in known)
    return middle + DEVIATIONS * max(deviation, SMALLEST_DEVIATION * middle)


class Geno(Defense):
    """Withhold the gradient of a party whose norm is out of the ordinary.

    It then gets none, and the metric ``withheld`` is 1 for that step. LADSG means it
    against a party that scales its own training up. That party is not found: its
    embeddings fit better, and the gradients that the label party computes for it become
    smaller, not larger (``benchmarks/geno.py``: 0 to 0.4 % of the steps of
    `MaliciousAdam`, about as many as of honest parties). What is found, from about
    twice the norm on, is a gradient that was amplified on its way.

    With no λ given, λ is :func:`outlier_limit` of the party's own last norms. They are
    compared after a multiplication with √B, because the loss is a mean over B rows: the
    short batch at the end of an epoch has a norm that is larger by about that much. A
    batch of very few rows also varies more, and may be withheld now and then.

    A norm that was withheld does not enter the history, so that an attacker cannot move
    λ by being withheld. But gradients may also grow for a good reason and stay large,
    and an honest party must not be locked out for ever: after ``patience`` steps in a
    row without a gradient, its history is forgotten and learned anew. An attacker who
    does without gradients for that long is let in with it, and one who stays just below
    λ can move it slowly. Only a λ that is given cannot be moved.

    Parameters
    ----------
    lambda_ : float | None (default: None)
        Largest norm that passes; None learns it for each party.
    warmup : int (default: 20)
        Steps of a party that pass and are only learned from. A party that is out of
        the ordinary from its first step on is not found.
    window : int (default: 500)
        How many of the last norms of a party that passed are remembered.
    patience : int | None (default: 500)
        Steps in a row that are withheld before a party's history is forgotten; None
        never forgets it.
    """

    def __init__(
        self,
        lambda_: float | None = None,
        warmup: int = 20,
        window: int = 500,
        patience: int | None = 500,
    ) -> None:
        given = lambda_ is None or 0.0 < lambda_ < math.inf
        require(given, "lambda_", "a positive number or none", lambda_)
        require(warmup >= 1, "warmup", "at least 1", warmup)
        require(window >= warmup, "window", f"at least warmup ({warmup})", window)
        patient = patience is None or patience >= 1
        require(patient, "patience", "at least 1 or none", patience)
        self.lambda_ = lambda_
        self.warmup = warmup
        self.window = window
        self.patience = patience
        self.history: dict[str, deque[float]] = {}
        self.streak: dict[str, int] = {}  # steps in a row that were withheld

    def limit(self, party: str, rows: int) -> float:
        """Return λ, the largest norm that passes for a party at its next step.

        Parameters
        ----------
        party : str
            Its name.
        rows : int
            Rows of the gradient.
        """
        if self.lambda_ is not None:
            return self.lambda_
        known = self.history.get(party, ())
        if len(known) < self.warmup:
            return math.inf
        return outlier_limit(known) / math.sqrt(rows)

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor | None:
        """Return the rows, or None if their norm is above the limit.

        Parameters
        ----------
        rows : Tensor
            The gradient, B×d.
        batch : Batch
            Its party decides the limit; gets the metric ``withheld``.
        """
        norm, limit = gradient_norm(rows), self.limit(batch.party, len(rows))
        withheld = norm > limit
        batch.metrics["withheld"] = float(withheld)
        if self.lambda_ is None:
            self._learn(batch.party, norm * math.sqrt(len(rows)), withheld)
        return None if withheld else rows

    def _learn(self, party: str, norm: float, withheld: bool) -> None:
        norms = self.history.setdefault(party, deque(maxlen=self.window))
        if not withheld:
            norms.append(norm)
        self.streak[party] = self.streak.get(party, 0) + 1 if withheld else 0
        if self.streak[party] == self.patience:
            norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the norms of every party, the oldest first, and who is withheld."""
        norms = {party: list(norms) for party, norms in self.history.items()}
        return {"history": norms, "streak": dict(self.streak)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Parameters
        ----------
        state : dict[str, Any]
            As :meth:`state_dict` returned it.
        """
        if set(state) != {"history", "streak"}:
            raise ConfigError(f"Geno keeps a history, the saved state is {list(state)}")
        self.history = {
            party: deque(norms, maxlen=self.window)
            for party, norms in state["history"].items()
        }
        self.streak = dict(state["streak"])
