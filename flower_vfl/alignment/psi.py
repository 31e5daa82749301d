"""Private set intersection with the interface of the union.

The ring and the steps are those of `flower_vfl.alignment.psu`; the merging party makes
the intersection of the lists instead of their union. A party computes
2·Σ|X_j| + |X_i| + |I| exponentiations.

What each one learns, if all follow the protocol and none works with another:

- every party: the number of ids of each party, and which of its own ids are in the
  intersection of all. Not which of its ids two of three parties share: the merging
  party sees lists that are sorted under keys of others, so that it cannot tell its own
  ids in them.
- the merging party of three or more: how many ids each combination of parties shares.
- the server that relays: the sizes of the lists, when the contents are sealed.

That the label party learns which of its customers the other party has, and the other
way round, is the leak that the union avoids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from .elements import Elements, texts
from .lists import ListError, Positions
from .psu import PsuParty
from .result import Alignment


class PsiParty(PsuParty):
    """One party of one private set intersection; see `PsuParty` for the parameters."""

    def _combine(self, lists: Sequence[Elements]) -> Elements:
        return intersection(lists)

    def _size_allowed(self, size: int) -> bool:
        return size <= min(self._counts.values())

    def _alignment(self, universe: Elements, positions: Positions) -> Alignment:
        """Return the intersection without the dummies, which all parties know to be so.

        Every element of the intersection belongs to an id of this party.
        """
        inside = positions[positions >= 0]
        if len(np.unique(inside)) != len(universe) or len(inside) != len(universe):
            raise ListError("the intersection is not made of this party's ids")
        own, dummies = positions[: self._own], positions[self._own :]
        kept = np.ones(len(universe), bool)
        kept[dummies[dummies >= 0]] = False
        row = np.where(kept, np.cumsum(kept) - 1, -1)
        positions = np.where(own >= 0, row[own], -1) if len(row) else own
        none = np.empty(0, np.int64)
        return Alignment(universe[kept], positions, none, self._counts)


def intersection(lists: Sequence[Elements]) -> Elements:
    """Return the elements that every list has, sorted."""
    size = lists[0].shape[1]
    common = reduce(
        lambda one, other: np.intersect1d(one, other, assume_unique=True),
        map(texts, lists),
    )
    return common.view(np.uint8).reshape(-1, size)
