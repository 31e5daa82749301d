"""The ring as letters: who sends which list to whom, and in what order.

A `Member` turns the steps of one party into letters, so that whoever carries them (a
server, a test) only has to deliver each to its receiver. All letters of one exchange
can travel at the same time; n parties need 2n + 1 exchanges, the first of which is
`open`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flower_vfl.errors import PartyError

from .elements import Elements, InvalidElementError
from .lists import ListError
from .psu import Phase, PsuParty
from .result import Alignment

REMEDY = "The handshake has ended and nothing of it was kept; start a new one"


@dataclass(frozen=True, eq=False)
class RoundMessage:
    """One list on its way.

    Parameters
    ----------
    phase : Phase
        ``first``, ``blinded``, ``union`` or ``universe``.
    owner : str
        Whose ids these are; empty for the union and the universal ids.
    hop : int
        How many times the list has been sent, from 1.
    sender : str
        Who sends it.
    receiver : str
        To whom.
    elements : Elements
        The list.
    """

    phase: Phase
    owner: str
    hop: int
    sender: str
    receiver: str
    elements: Elements


def route(ring: Sequence[str], phase: Phase, owner: str, hop: int) -> tuple[str, str]:
    """Return who sends a list and who receives it; the universal ids go to all others."""
    count = len(ring)
    start = ring.index(owner) if owner in ring else 0
    sender = ring[(start + hop - 1) % count]
    if phase == "universe":
        return ring[-1], ""
    if phase == "first" and hop == count:  # all have raised it
        return sender, ring[0]
    return sender, ring[(start + hop) % count]


def expected(ring: Sequence[str], name: str) -> Iterator[tuple[Phase, str, int, str]]:
    """Yield phase, owner, hop and sender of every list that a party is to be sent."""
    count = len(ring)
    own: tuple[Phase, Phase] = ("first", "blinded")
    lists: list[tuple[Phase, str, int]] = [
        (phase, owner, hop)
        for hop in range(1, count + 1)
        for phase in own
        for owner in ring
    ]
    lists += [("union", "", hop) for hop in range(1, count)]
    lists += [("universe", "", count)]
    for phase, owner, hop in lists:
        sender, receiver = route(ring, phase, owner, hop)
        if (receiver or name) == name != sender:
            yield phase, owner, hop, sender


class Member:
    """A party on the ring.

    Parameters
    ----------
    party : PsuParty
        The party's steps: `PsuParty` or `PsiParty`.
    """

    def __init__(self, party: PsuParty) -> None:
        self.party = party
        self.name = party.name
        self.ring = party.ring
        self.alignment: Alignment | None = None
        self._taken: set[tuple[Phase, str, int]] = set()
        self._waiting = set(party.ring)  # whose lists the merging party lacks

    def open(self) -> list[RoundMessage]:
        """Return the letters that start the handshake."""
        try:
            first, blinded = self.party.announce()
        except BaseException:
            self.close()
            raise
        return [
            self._letter("first", self.name, 1, first),
            self._letter("blinded", self.name, 1, blinded),
        ]

    def take(self, letter: RoundMessage) -> list[RoundMessage]:
        """Return the letters that follow from one; PartyError if it is not acceptable."""
        try:
            self._check(letter)
            return self._answer(letter)
        except (ListError, InvalidElementError) as error:
            self.close()
            phase = letter.phase
            problem = f"has sent a bad list to '{self.name}' ({phase}): {error}"
            raise PartyError(letter.sender, problem, REMEDY) from None
        except BaseException:
            self.close()
            raise

    def missing(self) -> tuple[str, Phase] | None:
        """Return sender and phase of the first list that has not come, if any."""
        for phase, owner, hop, sender in expected(self.ring, self.name):
            if (phase, owner, hop) not in self._taken:
                return sender, phase
        return None

    def close(self) -> None:
        """Forget everything but a finished alignment."""
        self.party.close()

    def state_dict(self) -> dict[str, Any]:
        """Return all that has happened, as plain values and arrays, without the ids."""
        found = self.alignment
        return {
            "party": self.party.state_dict(),
            "alignment": None if found is None else found.state_dict(),
            "taken": sorted(map(list, self._taken)),
            "waiting": sorted(self._waiting),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another object of the same party and session was."""
        found = state["alignment"]
        self.party.load_state_dict(state["party"])
        self.alignment = None if found is None else Alignment.from_state(found)
        self._taken = {(phase, owner, hop) for phase, owner, hop in state["taken"]}
        self._waiting = set(state["waiting"])

    def _check(self, letter: RoundMessage) -> None:
        """Refuse a letter that is not on its way here, or that was here before."""
        key = (letter.phase, letter.owner, letter.hop)
        count = len(self.ring)
        private = letter.phase in ("first", "blinded")
        hops = {"union": (1, count - 1), "universe": (count, count)}
        least, most = hops.get(letter.phase, (1, count))
        if not least <= letter.hop <= most or private != (letter.owner in self.ring):
            raise ListError("no such list travels in this handshake")
        sender, receiver = route(self.ring, *key)
        receiver = receiver or self.name
        if (letter.sender, letter.receiver) != (sender, receiver):
            raise ListError(f"it goes from '{sender}' to '{receiver}'")
        if receiver != self.name or sender == self.name:
            raise ListError(f"it is for '{receiver}'")
        if key in self._taken:
            raise ListError("it has come a second time")
        self._taken.add(key)

    def _answer(self, letter: RoundMessage) -> list[RoundMessage]:
        owner, elements = letter.owner, letter.elements
        last = letter.hop == len(self.ring)
        if letter.phase == "first":
            if not last:
                elements = self.party.raise_first(owner, elements)
            return self._pass_on(owner, letter.hop, elements)
        if letter.phase == "blinded" and not last:
            raised = self.party.raise_blinded(owner, elements)
            return [self._letter("blinded", owner, letter.hop + 1, raised)]
        if letter.phase == "union":
            return self._second_round(self.party.raise_union(elements), letter.hop + 1)
        if letter.phase == "blinded":
            self.party.unblind(elements)
        else:
            self.party.accept(elements)
        self._finish()
        return []

    def _pass_on(self, owner: str, hop: int, elements: Elements) -> list[RoundMessage]:
        """Send a list of the first round on, or merge when all are complete here."""
        full = hop >= len(self.ring) - 1
        if not full or self.name != self.ring[0]:
            return [self._letter("first", owner, hop + 1, elements)]
        self.party.collect(owner, elements)
        self._waiting.discard(owner)
        return [] if self._waiting else self._second_round(self.party.merge(), 1)

    def _second_round(self, union: Elements, hop: int) -> list[RoundMessage]:
        if self.name != self.ring[-1]:
            return [self._letter("union", "", hop, union)]
        self.party.accept(union)
        self._finish()
        return [
            RoundMessage("universe", "", hop, self.name, other, union)
            for other in self.ring[:-1]
        ]

    def _finish(self) -> None:
        if self.party.complete:
            self.alignment = self.party.finish()

    def _letter(
        self, phase: Phase, owner: str, hop: int, list_: Elements
    ) -> RoundMessage:
        sender, receiver = route(self.ring, phase, owner, hop)
        return RoundMessage(phase, owner, hop, sender, receiver, list_)


def relay(
    members: Iterable[Member], tap: Callable[[RoundMessage], None] | None = None
) -> dict[str, Alignment]:
    """Return every party's alignment after a handshake in this process.

    Parameters
    ----------
    members : Iterable[Member]
        All parties of the ring.
    tap : Callable[[RoundMessage], None] | None (default: None)
        Sees every letter before it is delivered.
    """
    by_name = {member.name: member for member in members}
    letters = [letter for member in by_name.values() for letter in member.open()]
    while letters:
        following: list[RoundMessage] = []
        for letter in letters:
            if tap:
                tap(letter)
            following += by_name[letter.receiver].take(letter)
        letters = following
    alignments = {name: member.alignment for name, member in by_name.items()}
    missing = [name for name, alignment in alignments.items() if alignment is None]
    if missing:
        raise PartyError(missing[0], "has not finished the handshake", REMEDY)
    return {name: found for name, found in alignments.items() if found is not None}
