"""Private set intersection with the interface of the union.

The ring and the steps are those of `flower_vfl.alignment.psu`; the merging party makes
the intersection of the lists instead of their union. A party computes
2·Σ|X_j| + |X_i| + |I| exponentiations.

If all parties follow the protocol and do not collude,

- every party learns the number of ids of each party, and which of its own ids are in
  the intersection of all. It does not learn which of its ids only some parties share:
  the merging party cannot recognise its own ids in lists under the keys of others;
- the merging party of three or more learns how many ids each combination shares;
- the server learns the sizes of the lists, because their contents are encrypted.

The union avoids that parties learn which of their ids are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import numpy as np

from .elements import Elements, ListError, Positions, as_strings
from .psu import AlignedIds, PsuParty


class PsiParty(PsuParty):
    """One party of one private set intersection."""

    def _combine(self, lists: Sequence[Elements]) -> Elements:
        common = reduce(
            partial(np.intersect1d, assume_unique=True), map(as_strings, lists)
        )
        return common.view(np.uint8).reshape(-1, self.group.size)

    def _size_allowed(self, size: int) -> bool:
        return size <= min(self._counts.values())

    def _aligned(self, universe: Elements, positions: Positions) -> AlignedIds:
        """Return the intersection without the dummies, which all parties share."""
        inside = positions[positions >= 0]
        if len(np.unique(inside)) != len(universe) or len(inside) != len(universe):
            raise ListError(
                "the intersection has elements that are not this party's ids"
            )
        own, dummies = positions[: self._own], positions[self._own :]
        kept = np.ones(len(universe), bool)
        kept[dummies[dummies >= 0]] = False
        row = np.where(kept, np.cumsum(kept) - 1, -1)
        positions = np.where(own >= 0, row[own], -1) if len(row) else own
        none = np.empty(0, np.int64)
        return AlignedIds(universe[kept], positions, none, self._counts)


METHODS: dict[str, type[PsuParty]] = {"psu": PsuParty, "psi": PsiParty}
