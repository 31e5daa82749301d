"""The alignment of ids before training: the strategy carries letters it cannot read."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import INFO

from flwr.supercore import log

from flower_vfl.alignment import DEFAULT_GROUP, GROUPS, METHODS, Sealed
from flower_vfl.alignment.handshake import Invitation
from flower_vfl.alignment.messages import (
    Stage,
    pack_hellos,
    pack_invitation,
    pack_parts,
    unpack_hellos,
    unpack_parts,
    unpack_sizes,
)
from flower_vfl.alignment.ring import REMEDY
from flower_vfl.errors import ConfigError, PartyError, unknown_name
from flower_vfl.protocol.config import PartyDescription
from flower_vfl.protocol.messages import Content, Value, Verb

from .messenger import Messenger, NoReplyError
from .progress import AlignmentProgress

NONE = "none"
ALIGNMENTS = (NONE, *METHODS)
RELAY_BYTES = 16 << 20
_PARTS = 4  # of a full message: an odd end of one list leaves room for the next
_GOODBYE = 10.0  # seconds to wait for parties that are told to forget a handshake


@dataclass(frozen=True)
class Alignment:
    """How the strategy aligns the parties' ids before training.

    Parameters
    ----------
    method : str (default: "none")
        ``"psu"`` trains on the private union of the parties' ids, ``"psi"`` on their
        intersection; ``"none"`` where all have the same rows in the same order.
    group : str (default: "ristretto255")
        The group that alignment computes in, one of `flower_vfl.alignment.GROUPS`.
    padding : int (default: 0)
        Dummy ids of each party, which blur the size of the intersection.
    relay_bytes : int (default: 16 MiB)
        Largest number of bytes of lists in one message.

    Examples
    --------
    >>> from flower_vfl.strategies import Alignment, VerticalStrategy
    >>> strategy = VerticalStrategy(alignment=Alignment("psu", padding=100))
    """

    method: str = NONE
    group: str = DEFAULT_GROUP
    padding: int = 0
    relay_bytes: int = RELAY_BYTES

    def __post_init__(self) -> None:
        """Refuse unknown names and impossible numbers."""
        if self.method not in ALIGNMENTS:
            raise unknown_name("alignment", self.method, ALIGNMENTS)
        if self.group not in GROUPS:
            raise unknown_name("group", self.group, GROUPS)
        if self.padding < 0:
            raise ConfigError(f"padding must not be negative, got {self.padding}")
        if self.relay_bytes < 1:
            raise ConfigError(f"relay_bytes must be positive, got {self.relay_bytes}")

    def __bool__(self) -> bool:
        """Return whether ids are aligned at all."""
        return self.method != NONE

    def invitation(self, ring: Sequence[str]) -> Invitation:
        """Return the invitation to a new handshake."""
        return Invitation(
            secrets.token_bytes(32),
            self.method,
            self.group,
            tuple(ring),
            self.padding,
            max(1, self.relay_bytes // _PARTS),
        )


class Relay:
    """Sealed parts on their way: in order, and not too many at a time."""

    def __init__(self, ring: Sequence[str], limit: int) -> None:
        self._limit = limit
        self._boxes: dict[str, deque[Sealed]] = {name: deque() for name in ring}
        self._more: set[str] = set()
        self.merged: int | None = None  # size of the merged list, once it is known

    def collect(self, sender: str, parts: Iterable[Sealed], more: bool) -> None:
        """Take in what a party has sent."""
        for part in parts:
            header = part.header
            if header.sender != sender or header.receiver not in self._boxes:
                raise PartyError(
                    sender,
                    f"has sent a letter from '{header.sender}' to '{header.receiver}'",
                    REMEDY,
                )
            self._boxes[header.receiver].append(part)
            if header.phase == "union":
                self.merged = header.count
        self._more.discard(sender)
        if more:
            self._more.add(sender)

    def due(self) -> dict[str, list[Sealed]]:
        """Return what goes out next; an empty list asks a party for more."""
        return {
            name: self._next(box)
            for name, box in self._boxes.items()
            if box or name in self._more
        }

    def _next(self, box: deque[Sealed]) -> list[Sealed]:
        parts: list[Sealed] = []
        size = 0
        while box and (not parts or size + len(box[0].content) <= self._limit):
            parts.append(box.popleft())
            size += len(parts[-1].content)
        return parts


class Aligner:
    """Has the parties of a run align their ids."""

    def __init__(
        self,
        messenger: Messenger,
        settings: Alignment,
        ring: Sequence[str],
        key: bytes,
        progress: bool | None = None,
    ) -> None:
        self._messenger = messenger
        self._settings = settings
        self._invitation = settings.invitation(ring)
        self._key = key
        self._progress = progress

    def align(
        self, parties: Sequence[PartyDescription], reuse: bool
    ) -> dict[str, PartyDescription]:
        """Put all parties on aligned rows and return their new descriptions."""
        if reuse:
            return self._place(parties, common_digest(parties))
        try:
            return self._place(parties, self._shake_hands())
        except BaseException:
            self._drop()
            raise

    def _shake_hands(self) -> str:
        """Hold a handshake and return the digest of the alignment."""
        started = time.monotonic()
        replies = self._exchange()
        ring = self._invitation.ring
        digest, sizes = _outcome(replies[ring[0]])
        for name, reply in replies.items():
            if _outcome(reply) != (digest, sizes):
                problem = f"has another outcome of the alignment than '{ring[0]}'"
                raise PartyError(name, problem, REMEDY)
        *counts, aligned = sizes
        listed = ", ".join(f"{n} {c}" for n, c in zip(ring, counts, strict=True))
        seconds = time.monotonic() - started
        method = self._invitation.method
        log(INFO, "aligned by %s in %.1f s: %d rows", method, seconds, aligned)
        log(INFO, "ids, as all parties and this server now know: %s", listed)
        if not aligned:
            raise ConfigError("the parties have no id in common to train on")
        return digest

    def _exchange(self) -> dict[str, Content]:
        """Carry all letters; return what the parties say at the end."""
        ring, limit = self._invitation.ring, self._settings.relay_bytes
        begun = self._ask(Stage.BEGIN, dict.fromkeys(ring, self._proposal()), "keys")
        hellos = [hello for reply in begun.values() for hello in unpack_hellos(reply)]
        counts = [reply.number("ids") for reply in begun.values()]
        relay = Relay(ring, limit)
        with AlignmentProgress(counts, self._settings.method, self._progress) as bar:
            greeting = {**pack_hellos(hellos), "limit": limit}
            replies = self._ask(Stage.MEET, dict.fromkeys(ring, greeting), "own lists")
            while True:
                for name, reply in replies.items():
                    more = bool(reply.config.get("more", False))
                    relay.collect(name, unpack_parts(reply), more)
                    bar.done(name, reply.number("exponentiations"), relay.merged)
                due = relay.due()
                if not due:
                    break
                replies = self._deliver(due)
        ending: dict[str, Value] = {"key": self._key}
        return self._ask(Stage.FINISH, dict.fromkeys(ring, ending), "end")

    def _deliver(self, due: Mapping[str, Sequence[Sealed]]) -> dict[str, Content]:
        phases = sorted({p.header.phase for parts in due.values() for p in parts})
        limit = self._settings.relay_bytes
        contents: dict[str, dict[str, Value]] = {
            name: {**pack_parts(parts), "limit": limit} for name, parts in due.items()
        }
        phase = f"{' and '.join(phases)} lists" if phases else "own lists"
        return self._ask(Stage.RELAY, contents, phase)

    def _place(
        self, parties: Sequence[PartyDescription], digest: str
    ) -> dict[str, PartyDescription]:
        config = {**self._proposal(), "aligned": digest, "key": self._key}
        asked = dict.fromkeys(self._invitation.ring, config)
        replies = self._ask(Stage.PLACE, asked, "end")
        return {
            each.name: replace(
                each,
                rows=replies[each.name].number("rows"),
                ids_digest=digest,
                split_digest=replies[each.name].text("split-digest"),
            )
            for each in parties
        }

    def _proposal(self) -> dict[str, Value]:
        return pack_invitation(self._invitation)

    def _ask(
        self, stage: Stage, contents: Mapping[str, Mapping[str, Value]], phase: str
    ) -> dict[str, Content]:
        """Send one request to each named party; an error tells the phase."""
        messenger = self._messenger
        requests = {
            name: Content({**config, "stage": stage.value})
            for name, config in contents.items()
        }
        where = f"while ids were aligned ({phase})"
        try:
            return messenger.ask(Verb.ALIGN, requests)
        except PartyError as error:
            problem, remedy = f"{error.problem}, {where}", error.remedy
            if isinstance(error, NoReplyError):  # it would advise to resume
                remedy = f"Look at that node's log. {REMEDY}"
                raise PartyError(error.party, problem, remedy) from None
            raise type(error)(error.party, problem, remedy) from None

    def _drop(self) -> None:
        """Have all parties forget the handshake, as far as they can be reached."""
        contents = {
            name: Content({"stage": Stage.DROP.value}) for name in self._invitation.ring
        }
        messenger = self._messenger
        with suppress(Exception):
            messenger.tell(Verb.ALIGN, contents, _GOODBYE)


def _outcome(reply: Content) -> tuple[str, list[int]]:
    """Return what all parties must say at the end: a digest, and the sizes."""
    return reply.text("aligned"), unpack_sizes(reply)


def common_digest(descriptions: Sequence[PartyDescription]) -> str:
    """Return the digest of the alignment that all parties have kept."""
    first = descriptions[0]
    for party in descriptions:
        if not party.aligned or party.aligned != first.aligned:
            kept = "another" if party.aligned else "no"
            raise PartyError(
                party.name,
                f"has kept {kept} alignment to go on with",
                "Give every node a state-dir of its own, or start without resume: "
                "that aligns the ids anew",
            )
    return first.aligned
