"""A party's side of the alignment handshake, and the alignment that it saves.

A `Member` turns the steps of one party on the ring into round messages; n parties need
2n + 1 exchanges. Everything random is drawn at the start: a step that is repeated after
a crash gives the same chunks, and no nonce is ever used for two contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import PartyError

from ..parties.checkpoints import DamagedError, RecordStore, from_bytes, to_bytes
from .channel import ChunkCodec, SecureChannel
from .elements import Elements, InvalidElementError, ListError
from .groups import make_group
from .ids import encode_ids
from .keys import AlignmentSettings
from .messages import (
    REMEDY,
    EncryptedChunk,
    HandshakeConfig,
    Header,
    Hello,
    RoundMessage,
)
from .psu import METHODS, AlignedIds, Phase, PsuParty

CHECKPOINT = "alignment"  # tag of the checkpoint with a finished alignment
TAG_BYTES = 16  # that encryption adds to a chunk
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
        and (count > 2 or key[::2] != ("blinded", 1))  # two send one list for both
    }


class Member:
    """A party on the ring."""

    def __init__(self, party: PsuParty) -> None:
        self.party, self.name, self.ring = party, party.name, party.ring
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
        messages = [self._message("first", self.name, 1, first)]
        if blinded is not None:
            messages.append(self._message("blinded", self.name, 1, blinded))
        return messages

    def receive(self, message: RoundMessage) -> list[RoundMessage]:
        """Return the messages that follow from one; PartyError if it is refused."""
        header = message.header
        try:
            self._check(header)
            return self._answer(header, message.elements)
        except BaseException as error:
            self.close()
            if not isinstance(error, ListError | InvalidElementError):
                raise
            problem = f"has sent a bad list to '{self.name}' ({header.phase}): {error}"
            raise PartyError(header.sender, problem, REMEDY) from None

    def missing(self) -> tuple[str, Phase] | None:
        """Return sender and phase of the first list that has not come, if any."""
        keys = (key for key in self._senders if key not in self._received)
        return next(((self._senders[key], key[0]) for key in keys), None)

    def close(self) -> None:
        """Forget everything but the aligned ids."""
        self.party.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and arrays, without the ids."""
        return {
            "party": self.party.state_dict(),
            "aligned": self.aligned and self.aligned.state_dict(),
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
        if header.phase == "first" and self.party.two and not last:
            elements, raised = self.party.raise_both(owner, elements)
            blinded = self._message("blinded", owner, hop + 1, raised)
            return [*self._pass_on(owner, hop, elements), blinded]
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


class Handshake:
    """One party's side of one handshake."""

    def __init__(
        self,
        name: str,
        config: HandshakeConfig,
        own: AlignmentSettings,
        ids: Sequence[bytes],
    ) -> None:
        if config.method not in own.methods:
            others = f"only in {' and '.join(own.methods)}"
            problem = f"does not take part in '{config.method}', {others}"
            remedy = "Choose another alignment, or alignment-methods of that node"
            raise PartyError(name, problem, remedy)
        self.name, self.config = name, config
        group, session = make_group(config.group), config.session
        settings = own.identity, own.pins_of_others(name), own.trust_server
        self._channel = SecureChannel(name, session, config.agreed(), *settings)
        given = config.ring, ids, group, session, config.padding
        self._member = Member(METHODS[config.method](name, *given))
        own.check(name, config.padding, config.ring[0])
        rows = max(1, config.chunk_bytes // group.size)
        self._chunk_bytes = rows * group.size + TAG_BYTES
        self._codec = ChunkCodec(self._channel, group, rows)
        # messages to send, each with the number of its next chunk
        self._pending: deque[tuple[RoundMessage, int]] = deque()
        self._has_keys = False

    @property
    def exponentiations(self) -> int:
        """How many elements this party has raised to a key."""
        return self._member.party.exponentiations

    def hello(self) -> Hello:
        """Return the public keys that the other parties need."""
        return self._channel.hello()

    def exchange_keys(self, hellos: Sequence[Hello]) -> None:
        """Derive keys with the other parties and compute the first lists."""
        names = sorted(hello.sender for hello in hellos)
        if self._has_keys or names != sorted(self.config.ring):
            problem = f"got the hellos of {names} in the handshake"
            raise PartyError(self.name, problem, REMEDY)
        self._channel.exchange_keys(hellos)
        self._has_keys = True
        self._pending.extend((message, 0) for message in self._member.start())

    def receive(self, chunks: Sequence[EncryptedChunk]) -> None:
        """Decrypt chunks, and compute the lists that follow from whole ones."""
        for chunk in chunks:
            message = self._codec.decode(chunk)
            if message is not None:
                following = self._member.receive(message)
                self._pending.extend((each, 0) for each in following)

    def next_chunks(self, limit: int) -> list[EncryptedChunk]:
        """Return the next chunks to send, at most so many bytes of them."""
        chunks: list[EncryptedChunk] = []
        size = 0
        while self._pending and (not chunks or size + self._chunk_bytes <= limit):
            message, number = self._pending.popleft()
            chunks.append(self._codec.encode(message, number))
            size += len(chunks[-1].content)
            if number + 1 < self._codec.chunks(message):
                self._pending.appendleft((message, number + 1))
        return chunks

    @property
    def has_more(self) -> bool:
        """Whether chunks are left to send."""
        return bool(self._pending)

    def finish(self) -> SavedAlignment:
        """Forget everything but the aligned ids and return them."""
        missing, aligned = self._member.missing(), self._member.aligned
        self.close()
        if missing is not None:
            sender, phase = missing
            problem = f"its {phase} list has not arrived at '{self.name}'"
            raise PartyError(sender, f"{problem}, or not all of it", REMEDY)
        assert aligned is not None  # all lists have come
        return SavedAlignment(aligned, aligned.fingerprint(self.config.agreed()))

    def close(self) -> None:
        """Forget the keys and all lists."""
        self._member.close()
        self._channel.close()
        self._codec.close()
        self._pending.clear()

    def save(self) -> bytes:
        """Return the state as bytes: secrets of this session, but no ids."""
        state = {
            "config": vars(self.config),
            "has_keys": self._has_keys,
            "channel": self._channel.state_dict(),
            "member": self._member.state_dict(),
            "codec": self._codec.state_dict(),
            "pending": [
                [message.header.to_list(), message.elements, number]
                for message, number in self._pending
            ],
        }
        return to_bytes(_exchanged(state))

    @classmethod
    def restore(
        cls, data: bytes, name: str, own: AlignmentSettings, ids: Any
    ) -> Handshake:
        """Return a handshake from its saved state."""
        state = _exchanged(from_bytes(data))
        encoded = [] if state["has_keys"] else ids_of(name, ids, own)
        restored = cls(name, HandshakeConfig(**state["config"]), own, encoded)
        restored._has_keys = state["has_keys"]
        restored._channel.load_state_dict(state["channel"])
        restored._member.load_state_dict(state["member"])
        restored._codec.load_state_dict(state["codec"])
        restored._pending.extend(
            (RoundMessage(Header.from_list(header), elements), number)
            for header, elements, number in state["pending"]
        )
        return restored


def ids_of(name: str, ids: Any, own: AlignmentSettings) -> list[bytes]:
    """Return the encoded ids of a party."""
    if ids is None:
        raise PartyError(name, "has no ids to align", "Give it an id for every row")
    return encode_ids(ids, own.normalise)


@dataclass(frozen=True, eq=False)
class SavedAlignment:
    """A finished alignment, which a party saves beside its checkpoints."""

    aligned: AlignedIds
    fingerprint: str

    def save(self, store: RecordStore) -> None:
        """Save it, for runs that resume."""
        aligned = self.aligned.state_dict()
        state = {"alignment": aligned, "fingerprint": self.fingerprint}
        store.save(CHECKPOINT, _exchanged(state))

    @classmethod
    def load(cls, store: RecordStore) -> SavedAlignment | None:
        """Return the saved alignment, None if there is none."""
        if CHECKPOINT not in store.tags():
            return None
        try:
            state = _exchanged(store.load(CHECKPOINT))
        except DamagedError as error:
            remedy = "Start without resume, which aligns the ids again"
            raise PartyError(store.owner, str(error), remedy) from error
        return cls(AlignedIds(**state["alignment"]), state["fingerprint"])


def _exchanged(state: Any) -> Any:
    """Return a state with tensors, as checkpoints need them, for arrays, or back."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(np.require(state, requirements=["C", "W"]))
    if isinstance(state, Tensor):
        return state.numpy()
    if isinstance(state, Mapping):
        return {key: _exchanged(value) for key, value in state.items()}
    return [_exchanged(value) for value in state] if isinstance(state, list) else state
