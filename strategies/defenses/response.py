"""How strongly parties respond to gradients: what gives an active attacker away.

A party that scales its own training up (`flower_vfl.leakage.attacks.malicious`) gets smaller
gradients, because its embeddings fit better, and moves its embeddings further all the
same. So its embeddings move further for each gradient than those of the others do.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from flower_vfl.rows import row_norms

TRACKED = 4096  # rows whose embeddings are remembered, of each party
MEASUREMENTS = 50  # steps over which a response is a median


@dataclass
class Response:
    """How strongly a party responds."""

    ratio: float
    rise: float


class Responses:
    """The response of every party: movement of its embeddings over its gradient.

    The movement is the median distance, over the rows of a batch, from the embedding
    that the party sent for the same row in the epoch before; the gradient counts with
    its median norm over the rows. A party's response is the median over the last 50
    batches, and is compared with the median response of the others; and this ratio with
    the median of its own first 50 values. Only the first 4096 rows are remembered.
    """

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}  # embeddings by row, NaN if not yet sent
        self._logs: dict[str, deque[float]] = {}
        self._middles: dict[str, float] = {}  # the median of each party's logarithms
        self._first: dict[str, list[float]] = {}  # ratios

    def observe(
        self, party: str, embedding: Tensor, rows: Tensor, gradient: Tensor
    ) -> Response | None:
        """Take one batch into account; return the response so far, None if not known."""
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
            return Response(ratio, 1.0)
        return Response(ratio, ratio / median(first))

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

    def __repr__(self) -> str:
        """Return what is known of whom."""
        known = ", ".join(f"{party}: {len(logs)}" for party, logs in self._logs.items())
        return f"Responses({known})"

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""
        known = {party: kept.cpu().clone() for party, kept in self._known.items()}
        logs = {party: list(kept) for party, kept in self._logs.items()}
        first = {party: list(kept) for party, kept in self._first.items()}
        return {"known": known, "logs": logs, "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self._known = {party: kept.clone() for party, kept in state["known"].items()}
        self._logs = {
            party: deque(kept, maxlen=MEASUREMENTS)
            for party, kept in state["logs"].items()
        }
        self._first = {party: list(kept) for party, kept in state["first"].items()}
        self._middles = {}
        for party in self._logs:
            self._summarise(party)
