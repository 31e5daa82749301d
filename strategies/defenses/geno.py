"""LADSG: Label-Anonymized Distillation and Similar Gradient Substitution (Yan et al.).

Its gradient-based evaluation of network outliers (Geno), algorithm 3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from logging import WARNING
from statistics import median
from typing import Any

import torch
from flwr.supercore import log
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.rows import row_norms
from flower_vfl.transform import Batch

from .base import RowTransform, require
from .response import Response, Responses

DEVIATIONS = 6.0  # a norm is too large so many deviations above the median
SMALLEST_DEVIATION = 0.1  # of the median
LARGEST_NORM = 1e300  # leaves room for what norms are multiplied with
SUSPICION = (
    "step %d: the embeddings of '%s' move %.1f times as far for its gradients as those "
    "of the other parties, %.1f times as far as at the begin; it may scale its "
    "training up to learn the labels, or have another model or learning rate. %s"
)


def gradient_norm(rows: Tensor) -> float:
    """Return the Euclidean norm of a whole gradient; always finite."""
    norms = row_norms(rows).double().clamp_max_(LARGEST_NORM)
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
    """
    known = list(norms)
    middle = median(known)
    if middle == 0.0:
        return math.inf
    deviation = median(abs(norm - middle) for norm in known)
    return middle + DEVIATIONS * max(deviation, SMALLEST_DEVIATION * middle)


class Geno(RowTransform):
    """Withhold the gradient of a party whose norm is out of the ordinary.

    It then gets none, and the metric ``withheld`` is 1 for that step. LADSG means it
    against a party that scales its own training up. The norm does not show that party:
    its embeddings fit better, and the gradients that the label party computes for it
    become smaller, not larger. What a norm shows, from about twice the ordinary one on,
    is a gradient that was amplified on its way.

    What shows the active party is its response, our addition: how far its embeddings
    move for the gradient that it gets, compared with the other parties
    (:class:`~flower_vfl.strategies.defenses.response.Responses`). It is suspected from
    ``response`` times theirs on, or from half of that on if it has also grown to
    ``rise`` times what it was at the begin: a warning names the party once, and the
    metric ``suspected`` is 1. Honest parties that have many more columns, larger
    embeddings or a higher learning rate than the others respond more strongly too, so
    a suspect is only withheld from with ``exclude=True``. ``benchmarks/geno.py`` prints
    what is found.

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
    response : float | None (default: 5.0)
        A party that responds so many times as strongly as the others is suspected; None
        does not look. There must be two passive parties, embeddings that pass by (so
        not in a deployment that is not vertical), and more than 50 steps after the
        first epoch.
    rise : float (default: 2.0)
        What counts as a change of a party's own response; it takes more than 100 steps
        after the first epoch to see one.
    exclude : bool (default: False)
        Whether the gradients of a suspect are withheld, from then on.
    """

    def __init__(
        self,
        lambda_: float | None = None,
        warmup: int = 20,
        window: int = 500,
        patience: int | None = 500,
        response: float | None = 5.0,
        rise: float = 2.0,
        exclude: bool = False,
    ) -> None:
        given = lambda_ is None or 0.0 < lambda_ < math.inf
        require(given, "lambda_", "a positive number or none", lambda_)
        require(warmup >= 1, "warmup", "at least 1", warmup)
        require(window >= warmup, "window", f"at least warmup ({warmup})", window)
        patient = patience is None or patience >= 1
        require(patient, "patience", "at least 1 or none", patience)
        looking = response is None or 1.0 < response < math.inf
        require(looking, "response", "above 1 or none", response)
        require(1.0 < rise < math.inf, "rise", "above 1", rise)
        unknown = exclude and response is None
        require(not unknown, "exclude", "false where response is none", exclude)
        self.lambda_ = lambda_
        self.warmup = warmup
        self.window = window
        self.patience = patience
        self.history: dict[str, deque[float]] = {}
        self.streak: dict[str, int] = {}  # steps in a row that were withheld
        self.response = response
        self.rise = rise
        self.exclude = exclude
        self.responses = Responses()
        self.suspects: set[str] = set()

    @property
    def sees_embeddings(self) -> bool:
        """Whether it looks at embeddings."""
        return self.response is not None

    def limit(self, party: str, rows: int) -> float:
        """Return λ, the largest norm that passes for a party at its next step."""
        if self.lambda_ is not None:
            return self.lambda_
        known = self.history.get(party, ())
        if len(known) < self.warmup:
            return math.inf
        return outlier_limit(known) / math.sqrt(rows)

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor | None:
        """Return the rows, or None if their norm is above the limit."""
        norm, limit = gradient_norm(rows), self.limit(batch.party, len(rows))
        withheld = norm > limit
        if self.lambda_ is None:
            self._learn(batch.party, norm * math.sqrt(len(rows)), withheld)
        self._suspect(rows, batch)
        withheld |= self.exclude and batch.party in self.suspects
        batch.metrics["withheld"] = float(withheld)
        return None if withheld else rows

    def _suspect(self, rows: Tensor, batch: Batch) -> None:
        """Look at how the party responds, as long as it gets gradients."""
        party = batch.party
        if self.response is None or batch.embedding is None or batch.rows is None:
            return
        if not (self.exclude and party in self.suspects):
            found = self.responses.observe(party, batch.embedding, batch.rows, rows)
            if found is not None:
                batch.metrics["response"] = found.ratio
                self._judge(found, batch)
        batch.metrics["suspected"] = float(party in self.suspects)

    def _judge(self, found: Response, batch: Batch) -> None:
        assert self.response is not None  # the caller looked
        much = found.ratio > self.response
        more = found.ratio > self.response / 2 and found.rise > self.rise
        if (much or more) and batch.party not in self.suspects:
            self.suspects.add(batch.party)
            told = batch.step, batch.party, found.ratio, found.rise, self._consequence
            log(WARNING, SUSPICION, *told)

    @property
    def _consequence(self) -> str:
        if self.exclude:
            return "It gets no gradients from now on"
        return "geno:exclude=true would withhold its gradients"

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
        return {
            "history": norms,
            "streak": dict(self.streak),
            "responses": self.responses.state_dict(),
            "suspects": sorted(self.suspects),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        if set(state) != set(self.state_dict()):
            raise ConfigError(
                f"Geno keeps {', '.join(self.state_dict())}; the saved state has "
                f"{', '.join(state) or 'nothing'}"
            )
        self.history = {
            party: deque(norms, maxlen=self.window)
            for party, norms in state["history"].items()
        }
        self.streak = dict(state["streak"])
        self.responses.load_state_dict(state["responses"])
        self.suspects = set(state["suspects"])
