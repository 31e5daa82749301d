"""The order of the lists on the ring: who sends which list to whom.

A `Member` turns the steps of one party into round messages; the server (or a test)
delivers each to its receiver. All messages of one exchange can travel at the same time;
n parties need 2n + 1 exchanges, the first of which is `start`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flower_vfl.errors import PartyError

from .elements import Elements, InvalidElementError, ListError
from .messages import REMEDY, Header, RoundMessage
from .psu import AlignedIds, Phase, PsuParty

_ListKey = tuple[Phase, str, int]  # phase, owner and hop
_OWNED: tuple[Phase, Phase] = ("first", "blinded")  # phases of one party's lists


def route(ring: Sequence[str], phase: Phase, owner: str, hop: int) -> tuple[str, str]:
    """Return sender and receiver of a list; no receiver means all others."""
    count = len(ring)
    start = ring.index(owner) if owner in ring else 0
    sender = ring[(start + hop - 1) % count]
    if phase == "universe":
        return ring[-1], ""
    if phase == "first" and hop == count:  # all have raised it
        return sender, ring[0]
    return sender, ring[(start + hop) % count]


def expected(ring: Sequence[str], name: str) -> dict[_ListKey, str]:
    """Return the sender of every list that a party receives."""
    count = len(ring)
    hops = range(1, count + 1)
    lists: list[_ListKey] = [
        *((phase, owner, hop) for hop in hops for phase in _OWNED for owner in ring),
        *(("union", "", hop) for hop in hops[:-1]),
        ("universe", "", count),
    ]
    routes = {key: route(ring, *key) for key in lists}
    return {
        key: sender
        for key, (sender, receiver) in routes.items()
        if (receiver or name) == name != sender
    }


class Member:
    """A party on the ring."""

    def __init__(self, party: PsuParty) -> None:
        self.party = party
        self.name = party.name
        self.ring = party.ring
        self.aligned: AlignedIds | None = None
        self._senders = expected(party.ring, party.name)
        self._received: set[_ListKey] = set()
        self._incomplete = set(party.ring)  # whose lists the merging party awaits

    def start(self) -> list[RoundMessage]:
        """Return the messages that start the handshake."""
        try:
            first, blinded = self.party.announce()
        except BaseException:
            self.close()
            raise
        return [
            self._message("first", self.name, 1, first),
            self._message("blinded", self.name, 1, blinded),
        ]

    def receive(self, message: RoundMessage) -> list[RoundMessage]:
        """Return the messages that follow from one; PartyError if it is refused."""
        header = message.header
        try:
            self._check(header)
            return self._answer(header, message.elements)
        except (ListError, InvalidElementError) as error:
            self.close()
            problem = f"has sent a bad list to '{self.name}' ({header.phase}): {error}"
            raise PartyError(header.sender, problem, REMEDY) from None
        except BaseException:
            self.close()
            raise

    def missing(self) -> tuple[str, Phase] | None:
        """Return sender and phase of the first list that has not come, if any."""
        for key, sender in self._senders.items():
            if key not in self._received:
                return sender, key[0]
        return None

    def close(self) -> None:
        """Forget everything but the aligned ids."""
        self.party.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and arrays, without the ids."""
        aligned = self.aligned
        return {
            "party": self.party.state_dict(),
            "aligned": None if aligned is None else aligned.state_dict(),
            "received": self._received,
            "incomplete": self._incomplete,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same party and session."""
        aligned = state["aligned"]
        self.party.load_state_dict(state["party"])
        self.aligned = None if aligned is None else AlignedIds(**aligned)
        self._received, self._incomplete = state["received"], state["incomplete"]

    def _check(self, header: Header) -> None:
        """Refuse a list that is not for this party, or that came before."""
        key = (header.phase, header.owner, header.hop)
        if key not in self._senders:
            raise ListError("this party receives no such list")
        if (header.sender, header.receiver) != (self._senders[key], self.name):
            raise ListError(f"it goes from '{self._senders[key]}' to '{self.name}'")
        if key in self._received:
            raise ListError("it came a second time")
        self._received.add(key)

    def _answer(self, header: Header, elements: Elements) -> list[RoundMessage]:
        owner, hop = header.owner, header.hop
        last = hop == len(self.ring)
        if header.phase == "first":
            if not last:
                elements = self.party.raise_first(owner, elements)
            return self._pass_on(owner, hop, elements)
        if header.phase == "blinded" and not last:
            raised = self.party.raise_blinded(owner, elements)
            return [self._message("blinded", owner, hop + 1, raised)]
        if header.phase == "union":
            return self._second_round(self.party.raise_union(elements), hop + 1)
        if header.phase == "blinded":
            self.party.unblind(elements)
        else:
            self.party.accept(elements)
        self._finish()
        return []

    def _pass_on(self, owner: str, hop: int, elements: Elements) -> list[RoundMessage]:
        """Send a list of the first round on, or merge when all lists are complete."""
        full = hop >= len(self.ring) - 1
        if not full or self.name != self.ring[0]:
            return [self._message("first", owner, hop + 1, elements)]
        self.party.collect(owner, elements)
        self._incomplete.discard(owner)
        return [] if self._incomplete else self._second_round(self.party.merge(), 1)

    def _second_round(self, union: Elements, hop: int) -> list[RoundMessage]:
        if self.name != self.ring[-1]:
            return [self._message("union", "", hop, union)]
        self.party.accept(union)
        self._finish()
        return [
            self._message("universe", "", hop, union, other) for other in self.ring[:-1]
        ]

    def _finish(self) -> None:
        if self.party.complete:
            self.aligned = self.party.finish()

    def _message(
        self, phase: Phase, owner: str, hop: int, elements: Elements, to: str = ""
    ) -> RoundMessage:
        sender, receiver = route(self.ring, phase, owner, hop)
        header = Header(phase, owner, hop, sender, receiver or to, len(elements))
        return RoundMessage(header, elements)
