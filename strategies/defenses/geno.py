"""LADSG: Label-Anonymized Distillation and Similar Gradient Substitution (Yan et al.).

https://arxiv.org/abs/2506.06742. Algorithm 3, gradient-based evaluation of network
outliers (Geno), and our addition, the response of a party to its gradients.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING
from statistics import median
from typing import Any

import torch
from flwr.supercore import log
from torch import Tensor

from flower_vfl.errors import ConfigError, require
from flower_vfl.rows import RowTransform, row_norms
from flower_vfl.transform import Batch

DEVIATIONS = 6.0  # a norm this many deviations above the median is an outlier
SMALLEST_DEVIATION = 0.1  # of the median
LARGEST_NORM = 1e300  # leaves room for products of norms
TRACKED = 4096  # rows of each party whose embeddings are remembered
MEASUREMENTS = 50  # steps over which a response is a median
SUSPICION = (
    "step %d: the embeddings of '%s' move %.1f times as far for its gradients as those "
    "of the other parties, %.1f times as far as at the start; it may scale up its "
    "training to learn the labels, or have another model or learning rate. %s"
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
    that after nearly equal norms the next honest one is not an outlier.
    """
    known = list(norms)
    middle = median(known)
    if middle == 0.0:  # nothing to compare with
        return math.inf
    deviation = median(abs(norm - middle) for norm in known)
    return middle + DEVIATIONS * max(deviation, SMALLEST_DEVIATION * middle)


@dataclass(eq=False)
class Geno(RowTransform):
    """Withhold the gradient of a party whose norm is an outlier.

    The metric ``withheld`` is 1 for that step. LADSG uses this against a party that
    scales up its own training, but its gradients become smaller: the norm reveals only
    a gradient that was amplified on its way.

    Our addition finds that party by its response: how far its embeddings move for its
    gradients, compared with the other parties. It is suspected from ``response`` times
    theirs on, or from half of that if its response has also grown to ``rise`` times
    its first value. A warning names the party once, and the metric ``suspected`` is 1.
    Honest parties with larger embeddings or a higher learning rate respond strongly,
    too: gradients of a suspect are only withheld with ``exclude=True``.

    With ``lambda_=None``, λ is the median plus 6 median absolute deviations of the
    party's last norms that passed, times √B for batches of B rows. An attacker who
    stays just below λ, or waits for ``patience`` steps, can move it.

    Parameters
    ----------
    lambda_ : float | None (default: None)
        Largest norm that passes; None learns it for each party.
    warmup, window : int (default: 20, 500)
        First steps of a party, which always pass, and how many of its last norms are
        remembered.
    patience : int | None (default: 500)
        Withheld steps in a row after which a party's history is forgotten; None never
        forgets it.
    response : float | None (default: 5.0)
        Ratio to the other parties' response from which a party is suspected; None does
        not measure it. It takes two passive parties, embeddings (only a vertical run
        has them), and more than 50 steps after the first epoch.
    rise : float (default: 2.0)
        What counts as a change of a party's own response; it takes more than 100 steps
        after the first epoch.
    exclude : bool (default: False)
        Whether all further gradients of a suspect are withheld.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import Geno
    >>> transform = Geno(lambda_=10.0)
    >>> batch = Batch("passive-1", step=1, seed=7)
    >>> transform(torch.full((2, 2), 100.0), batch) is None
    True
    >>> batch.metrics
    {'withheld': 1.0}
    """

    lambda_: float | None = None
    warmup: int = 20
    window: int = 500
    patience: int | None = 500
    response: float | None = 5.0
    rise: float = 2.0
    exclude: bool = False

    def __post_init__(self) -> None:
        given = self.lambda_ is None or 0.0 < self.lambda_ < math.inf
        require(given, "lambda_", "a positive number or none", self.lambda_)
        require(self.warmup >= 1, "warmup", "at least 1", self.warmup)
        least = f"at least warmup ({self.warmup})"
        require(self.window >= self.warmup, "window", least, self.window)
        patient = self.patience is None or self.patience >= 1
        require(patient, "patience", "at least 1 or none", self.patience)
        measured = self.response is None or 1.0 < self.response < math.inf
        require(measured, "response", "above 1 or none", self.response)
        require(1.0 < self.rise < math.inf, "rise", "above 1", self.rise)
        unknown = self.exclude and self.response is None
        require(not unknown, "exclude", "false where response is none", self.exclude)
        self.history: dict[str, deque[float]] = {}
        self.streak: dict[str, int] = {}  # withheld steps in a row
        self.responses, self.suspects = Responses(), set[str]()

    @property
    def sees_embeddings(self) -> bool:
        """Whether it needs the embeddings."""
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
        """Return the rows, or None if the party's gradient is withheld."""
        norm, limit = gradient_norm(rows), self.limit(batch.party, len(rows))
        withheld = norm > limit
        if self.lambda_ is None:
            self._learn(batch.party, norm * math.sqrt(len(rows)), withheld)
        if self.response is not None:
            self._measure_response(rows, batch, self.response)
        withheld |= self.exclude and batch.party in self.suspects
        batch.metrics["withheld"] = float(withheld)
        return None if withheld else rows

    def _learn(self, party: str, norm: float, withheld: bool) -> None:
        """Remember a norm that passed, or forget all norms once patience is over."""
        norms = self.history.setdefault(party, deque(maxlen=self.window))
        if not withheld:
            norms.append(norm)
        self.streak[party] = self.streak.get(party, 0) + 1 if withheld else 0
        if self.streak[party] == self.patience:
            norms.clear()

    def _measure_response(self, rows: Tensor, batch: Batch, suspicious: float) -> None:
        """Measure a party's response while it gets gradients, and suspect it."""
        if batch.embedding is None or batch.rows is None:
            return
        party = batch.party
        if not (self.exclude and party in self.suspects):
            found = self.responses.observe(party, batch.embedding, batch.rows, rows)
            if found is not None:
                ratio, rise = found
                batch.metrics["response"] = ratio
                grown = ratio > suspicious / 2 and rise > self.rise
                if (ratio > suspicious or grown) and party not in self.suspects:
                    self.suspects.add(party)
                    then = "geno:exclude=true would withhold its gradients"
                    then = "It gets no gradients from now on" if self.exclude else then
                    log(WARNING, SUSPICION, batch.step, party, *found, then)
        batch.metrics["suspected"] = float(party in self.suspects)

    def state_dict(self) -> dict[str, Any]:
        """Return norms (the oldest first), responses and suspects."""
        return {
            "history": {party: list(norms) for party, norms in self.history.items()},
            "streak": dict(self.streak),
            "responses": self.responses.state_dict(),
            "suspects": sorted(self.suspects),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if set(state) != set(self.state_dict()):
            keeps, has = ", ".join(self.state_dict()), ", ".join(state) or "nothing"
            raise ConfigError(f"Geno keeps {keeps}; the saved state has {has}")
        known = state["history"].items()
        self.history = {party: deque(norms, self.window) for party, norms in known}
        self.streak = dict(state["streak"])
        self.responses.load_state_dict(state["responses"])
        self.suspects = set(state["suspects"])


class Responses:
    """The response of every party: movement of its embeddings over its gradient.

    Both are medians over the rows of a batch, the movement since the epoch before. A
    response is the median over 50 batches. It is divided by the median of the others,
    and this ratio by the median of its own first 50 values.
    """

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}  # embeddings by row, NaN if not yet sent
        self._logs: dict[str, deque[float]] = {}
        self._middles: dict[str, float] = {}  # the median of each party's logarithms
        self._first: dict[str, list[float]] = {}  # ratios

    def observe(
        self, party: str, embedding: Tensor, rows: Tensor, gradient: Tensor
    ) -> tuple[float, float] | None:
        """Add one batch; return the ratio to the others and its rise, if known."""
        tracked = rows < TRACKED
        if not tracked.any():
            return None
        numbers = rows[tracked]
        now = embedding.detach().flatten(1)[tracked].to(gradient.dtype)
        known = self._known.get(party)
        if known is None or known.shape[1] != now.shape[1]:
            known = now.new_full((TRACKED, now.shape[1]), math.nan)
        known = self._known[party] = known.to(now.device, now.dtype)
        moved = float(row_norms(now - known[numbers]).nanmedian())
        known[numbers] = now
        norm = float(row_norms(gradient).median())
        if moved > 0.0 and norm > 0.0:  # neither is NaN
            logs = self._logs.setdefault(party, deque(maxlen=MEASUREMENTS))
            logs.append(math.log(moved) - math.log(norm))
            self._summarise(party)
        ratio = self.ratio(party)
        if ratio is None:
            return None
        first = self._first.setdefault(party, [])
        if len(first) < MEASUREMENTS:
            first.append(ratio)
            return ratio, 1.0
        return ratio, ratio / median(first)

    def ratio(self, party: str) -> float | None:
        """Return a party's response over that of the others; None if not yet known."""
        own = self._middles.get(party)
        others = [middle for name, middle in self._middles.items() if name != party]
        if own is None or not others:
            return None
        return math.exp(min(own - median(others), 700.0))

    def _summarise(self, party: str) -> None:
        if len(self._logs[party]) == MEASUREMENTS:
            self._middles[party] = median(self._logs[party])

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""
        known = {party: kept.cpu().clone() for party, kept in self._known.items()}
        logs = {party: list(kept) for party, kept in self._logs.items()}
        first = {party: list(kept) for party, kept in self._first.items()}
        return {"known": known, "logs": logs, "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._known = {party: kept.clone() for party, kept in state["known"].items()}
        self._first = {party: list(kept) for party, kept in state["first"].items()}
        self._logs, self._middles = {}, {}
        for party, kept in state["logs"].items():
            self._logs[party] = deque(kept, maxlen=MEASUREMENTS)
            self._summarise(party)
