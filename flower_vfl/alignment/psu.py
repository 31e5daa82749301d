"""Private set union: universal ids for all ids of all parties, step by step.

Algorithm 1 of FLORIST (Sun et al., Vertical Federated Learning without Revealing
Intersection Membership, https://arxiv.org/abs/2106.05508) for two parties, and the same
on a ring of n parties. Every party i draws three keys s1, s2, s3 for one session; H(x)
is the group element of id x.

1. First round. Each list ``H(X_i)^s1`` goes once around the ring and every party raises
   it to its own s1. The merging party (the first of the ring) makes the union of all.
2. Second round. The union goes around the ring and every party raises it to s2·s3. The
   last party sends the result to all: these are the universal ids U.
3. Blinded lists, at the same time as 1. Party i sends ``H(X_i)^s2`` around the ring,
   every other party raises it to its own s1·s2·s3, and party i raises what comes back
   to s1·s3: every id of party i is now under all keys, like the elements of U.

Two parties send no second list, as in Private-ID (Buddhavarapu et al.,
https://eprint.iacr.org/2020/599): the other party raises ``H(X_i)^s1`` for both rounds
(`raise_both`), and party i raises what comes back to s2·s3. With more parties the
blinded list needs a key of its own: under s1, a party that forwards it could find its
elements in the union.

The steps of Algorithm 1 are: `announce` 3 and 5, `raise_both` or `raise_first` 4 and 6,
`collect` and `merge` 7 and 8, `raise_union` 9, `accept` 10, and `raise_both` or
`raise_blinded`, `unblind` with `finish` 11 and 12. A party computes 2·Σ|X_j| + |U|
exponentiations, and |X_i| more with three parties or more.

Lists whose order could link elements are sorted by their bytes; the blinded lists keep
the order of the blinded elements, which is random to everybody else.
docs/alignment.md ("What is revealed") says what each party and the server learn.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import numpy as np

from flower_vfl.errors import ConfigError

from .elements import (
    Elements,
    Group,
    ListError,
    Positions,
    as_strings,
    check_distinct,
    framed,
    order_of,
    rows_of,
)
from .ids import dummy_messages

Phase = Literal["first", "blinded", "union", "universe"]
# Attributes of a party that its state has as they are
_FIELDS = (
    *("_keys", "_dummies", "_own", "_done", "_seen", "_counts", "_complete"),
    *("_order", "_size", "_mine", "_universe", "exponentiations"),
)
_Keys = tuple[int, int, int]  # s1, s2, s3


@dataclass(frozen=True, eq=False)
class AlignedIds:
    """What a party knows after an alignment.

    Parameters
    ----------
    universe : Elements
        The universal ids, sorted: the same at every party.
    positions : Positions
        Row of the universal id of each own id; -1 if it is not in the intersection.
    dummies : Positions
        Rows of the party's dummy ids.
    counts : Mapping[str, int]
        How many ids each party announced, dummies included.

    Examples
    --------
    >>> import numpy as np
    >>> universe, none = np.zeros((3, 32), np.uint8), np.empty(0, np.int64)
    >>> own = AlignedIds(universe, np.array([2, 0]), none, {"bank": 2, "shop": 2})
    >>> len(own.universe), own.positions.tolist()
    (3, [2, 0])
    """

    universe: Elements
    positions: Positions
    dummies: Positions
    counts: Mapping[str, int]

    def fingerprint(self, agreed: bytes) -> str:
        """Return a digest that is equal at all parties of one handshake only."""
        digest = hashlib.blake2b(framed(agreed), digest_size=32)
        digest.update(self.universe.data)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain values and arrays."""
        return {**vars(self), "counts": dict(self.counts)}


class PsuParty:
    """One party of one private set union: one method for each step, each step once."""

    def __init__(
        self,
        name: str,
        ring: Sequence[str],
        messages: Sequence[bytes],
        group: Group,
        session: bytes,
        padding: int = 0,
    ) -> None:
        if len(ring) < 2 or len(set(ring)) != len(ring) or name not in ring:
            needed = f"two or more parties with different names, '{name}' among them"
            raise ConfigError(f"alignment needs {needed}, not {list(ring)}")
        if not session:
            raise ConfigError("an alignment session needs a unique name")
        self.name = name
        self.ring = tuple(ring)
        self.two = len(ring) == 2
        self.group = group
        self.exponentiations = 0
        self._own = len(messages)
        self._messages: Sequence[bytes] | None = messages
        self._dummies: Sequence[bytes] | None = dummy_messages(padding)
        self._session = session
        s1, s2, s3 = (group.random_key() for _ in range(3))
        self._keys: _Keys | None = (s1, s2, s3)
        self._order: Positions | None = None
        self._done: set[tuple[Phase, str]] = set()
        self._seen: set[bytes] = set()
        self._counts: dict[str, int] = {name: len(messages) + padding}
        self._size: int | None = None
        self._complete: dict[str, Elements] = {}
        self._mine: Elements | None = None
        self._universe: Elements | None = None

    def announce(self) -> tuple[Elements, Elements | None]:
        """Return this party's list for the first round and its blinded list, if any."""
        s1, s2, _ = self._begin("first", self.name)
        self._done.add(("blinded", self.name))
        assert self._messages is not None and self._dummies is not None  # until now
        hashed = self.group.hash([*self._messages, *self._dummies], self._session)
        self._messages = self._dummies = None
        first = self._power(hashed, s1)
        if self.two:
            self._order = order_of(first)
            return first[self._order], None
        blinded = self._power(hashed, s2)
        self._order = order_of(blinded)
        return first[order_of(first)], blinded[self._order]

    def raise_both(self, owner: str, elements: Elements) -> tuple[Elements, Elements]:
        """Return the list of the only other party, raised, and blinded in its order."""
        s1, s2, s3 = self._begin("first", owner)
        self._begin("blinded", owner)
        self._check_list(owner, elements, ascending=True)
        raised = self._power(elements, s1)
        blinded = self._power(raised, s2, s3)
        return raised[order_of(raised)], blinded

    def raise_first(self, owner: str, elements: Elements) -> Elements:
        """Return another party's list of the first round, raised and sorted."""
        s1, _, _ = self._begin("first", owner)
        self._check_list(owner, elements, ascending=True)
        raised = self._power(elements, s1)
        return raised[order_of(raised)]

    def raise_blinded(self, owner: str, elements: Elements) -> Elements:
        """Return another party's blinded list, raised, in its order."""
        keys = self._begin("blinded", owner)
        self._check_list(owner, elements, ascending=False)
        return self._power(elements, *keys)

    def collect(self, owner: str, elements: Elements) -> None:
        """Keep a list that every party has raised; for the merging party."""
        if self.name != self.ring[0]:
            raise ListError(f"the lists are merged by '{self.ring[0]}'")
        if owner not in self._counts or owner in self._complete:
            raise ListError(f"the complete list of '{owner}' came out of turn")
        self._check_count(owner, elements)
        # no check against lists seen before: parties with the same ids send the same
        check_distinct(elements, ascending=True)
        if owner != self.ring[1]:  # which this party has raised itself, the last one
            self.group.validate(elements)
        self._complete[owner] = elements

    def merge(self) -> Elements:
        """Return the union of the collected lists, raised and sorted."""
        if set(self._complete) != set(self.ring):
            raise ListError("the lists cannot be merged before all have come")
        keys = self._begin_second()
        merged = self._combine(list(self._complete.values()))
        self._complete.clear()
        return self._raise_second(merged, keys)

    def raise_union(self, elements: Elements) -> Elements:
        """Return the union, raised and sorted; the last party has the universal ids."""
        if self.name == self.ring[0]:
            raise ListError("the merging party has raised the union already")
        keys = self._begin_second()
        self._check_new(elements)
        check_distinct(elements, ascending=True)
        return self._raise_second(elements, keys)

    def unblind(self, returned: Elements) -> None:
        """Raise this party's blinded list, which every other party has raised."""
        if self._keys is None or self._order is None or self._mine is not None:
            raise ListError("the blinded list came out of turn")
        if len(returned) != len(self._order):
            problem = f"{len(returned)} elements instead of {len(self._order)}"
            raise ListError(f"the blinded list has {problem}")
        check_distinct(returned, ascending=False)
        s1, s2, s3 = self._keys
        self._mine = self._power(returned, s2 if self.two else s1, s3)

    def accept(self, universe: Elements) -> None:
        """Keep the universal ids."""
        self._begin("universe", "")
        if len(universe) != self._size:
            found = f"{len(universe)} instead of {self._size}"
            raise ListError(f"the universal ids are {found}")
        check_distinct(universe, ascending=True)
        if self.name != self.ring[-1]:  # which made them
            self.group.validate(universe)
        self._universe = universe

    @property
    def complete(self) -> bool:
        """Whether all lists that this party needs have come."""
        return self._mine is not None and self._universe is not None

    def finish(self) -> AlignedIds:
        """Return the universal ids of this party's ids, and forget the keys."""
        if self._mine is None or self._universe is None or self._order is None:
            raise ListError("the alignment cannot finish before all lists have come")
        universe, order = self._universe, self._order
        positions = np.empty(len(order), np.int64)
        positions[order] = rows_of(self._mine, universe)
        self.close()
        return self._aligned(universe, positions)

    def close(self) -> None:
        """Forget the keys, the ids and all lists; no step can follow."""
        self._keys = self._messages = self._dummies = None
        self._order = self._mine = self._universe = None
        self._complete.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and arrays, without the ids."""
        return {name: getattr(self, name) for name in _FIELDS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same party and session."""
        for name in _FIELDS:
            setattr(self, name, state[name])

    def _combine(self, lists: Sequence[Elements]) -> Elements:
        union = np.unique(np.concatenate([as_strings(each) for each in lists]))
        return union.view(np.uint8).reshape(-1, self.group.size)

    def _size_allowed(self, size: int) -> bool:
        counts = self._counts.values()
        return max(counts) <= size <= sum(counts)

    def _aligned(self, universe: Elements, positions: Positions) -> AlignedIds:
        if (positions < 0).any():
            raise ListError("some ids of this party have no universal id")
        if len(np.unique(positions)) != len(positions):
            raise ListError("two ids of this party have the same universal id")
        own = self._own
        return AlignedIds(universe, positions[:own], positions[own:], self._counts)

    def _begin(self, phase: Phase, owner: str) -> _Keys:
        """Return the keys if this step is new and its time has not passed."""
        if self._keys is None:
            raise ListError("the session has ended")
        if phase in ("first", "blinded") and owner not in self.ring:
            raise ListError(f"'{owner}' is not one of the parties")
        if (phase, owner) in self._done:
            whose = f" of '{owner}'" if owner else ""
            raise ListError(f"a second {phase} list{whose} came; each is raised once")
        if phase != "universe" and self._size is not None:
            raise ListError(f"a {phase} list came after the union")
        if phase == "universe" and self._size is None:
            raise ListError("the universal ids came before the union")
        self._done.add((phase, owner))
        return self._keys

    def _begin_second(self) -> _Keys:
        phases: tuple[Phase, Phase] = ("first", "blinded")
        for owner in self.ring:
            if any((phase, owner) not in self._done for phase in phases):
                raise ListError(f"the union came before all lists of '{owner}'")
        return self._begin("union", "")

    def _raise_second(self, elements: Elements, keys: _Keys) -> Elements:
        if not self._size_allowed(len(elements)):
            raise ListError(f"the merged list cannot have {len(elements)} elements")
        self._size = len(elements)
        raised = self._power(elements, *keys[1:])
        return raised[order_of(raised)]

    def _power(self, elements: Elements, *keys: int) -> Elements:
        """Return elements raised to all the keys, and count them."""
        self.exponentiations += len(elements)
        return self.group.power(elements, self.group.product(*keys))

    def _check_list(self, owner: str, elements: Elements, ascending: bool) -> None:
        """Refuse a wrong count, a repeated element and a list that came before."""
        self._check_count(owner, elements)
        self._check_new(elements)
        check_distinct(elements, ascending)

    def _check_count(self, owner: str, elements: Elements) -> None:
        count = self._counts.setdefault(owner, len(elements))
        if count != len(elements):
            problem = f"has {len(elements)} elements; it announced {count}"
            raise ListError(f"the list of '{owner}' {problem}")

    def _check_new(self, elements: Elements) -> None:
        if not len(elements):
            return
        digest = hashlib.sha256(elements.tobytes()).digest()
        if digest in self._seen:
            raise ListError("the list has been raised before in this session")
        self._seen.add(digest)


class PsiParty(PsuParty):
    """One party of one private set intersection, with the steps of the union.

    The merging party makes the intersection of the lists instead of their union, and
    parties compute |I| instead of |U| exponentiations. No party learns which of its ids
    only some share: the merging one cannot recognise ids under the keys of others.
    """

    def _combine(self, lists: Sequence[Elements]) -> Elements:
        common = reduce(np.intersect1d, map(as_strings, lists))
        return common.view(np.uint8).reshape(-1, self.group.size)

    def _size_allowed(self, size: int) -> bool:
        return size <= min(self._counts.values())

    def _aligned(self, universe: Elements, positions: Positions) -> AlignedIds:
        """Return the intersection without the dummies, which all parties share."""
        inside = positions[positions >= 0]
        if len(np.unique(inside)) != len(universe) or len(inside) != len(universe):
            raise ListError("the intersection has elements that this party lacks")
        own, dummies = positions[: self._own], positions[self._own :]
        kept = np.ones(len(universe), bool)
        kept[dummies[dummies >= 0]] = False
        row = np.where(kept, np.cumsum(kept) - 1, -1)
        positions = np.where(own >= 0, row[own], -1) if len(row) else own
        none = np.empty(0, np.int64)
        return AlignedIds(universe[kept], positions, none, self._counts)


METHODS: dict[str, type[PsuParty]] = {"psu": PsuParty, "psi": PsiParty}
