"""A party's side of the alignment handshake, and the alignment that it keeps.

The library in `flower_vfl.alignment` takes whole lists and returns whole lists. Here
they become sealed parts that fit into messages, and everything can be saved between two
messages. All that is random is drawn at the beginning: a step that is done again, after
a process has died, gives the same letters again, and no number of a seal is ever used
for two contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError, unknown_name
from flower_vfl.parties.checkpoints import Store, from_bytes, to_bytes

from . import (
    GROUPS,
    METHODS,
    Alignment,
    AlignmentSettings,
    ChunkCodec,
    Hello,
    Member,
    RoundMessage,
    Sealed,
    SecureChannel,
    encode_ids,
    make_group,
    settings,
)
from .ring import REMEDY

TAG = "alignment"  # of the checkpoint that holds a finished alignment
TAG_BYTES = 16  # that a seal adds to a content
_LEAST_SESSION = 16  # bytes of a session's name


@dataclass(frozen=True)
class Invitation:
    """What the strategy proposes to all parties."""

    session: bytes
    method: str
    group: str
    ring: tuple[str, ...]
    padding: int
    part_bytes: int

    def __post_init__(self) -> None:
        """Refuse what no handshake can have."""
        if self.method not in METHODS:
            raise unknown_name("alignment method", self.method, METHODS)
        if self.group not in GROUPS:
            raise unknown_name("group", self.group, GROUPS)
        if len(self.session) < _LEAST_SESSION:
            raise ConfigError("an alignment session needs a random name of 16 bytes")

    def agreed(self) -> bytes:
        """Return what all parties must have the same."""
        return settings(self.method, self.group, self.ring, self.padding)


class Handshake:
    """One party's side of one handshake."""

    def __init__(
        self,
        name: str,
        invitation: Invitation,
        own: AlignmentSettings,
        messages: Sequence[bytes],
    ) -> None:
        if invitation.method not in own.methods:
            raise PartyError(
                name,
                f"does not take part in '{invitation.method}', only in "
                f"{' and '.join(own.methods)}",
                "Choose another alignment, or change alignment-methods of that node",
            )
        self.name = name
        self.invitation = invitation
        self.exponentiations = 0
        group = make_group(invitation.group)
        session, agreed = invitation.session, invitation.agreed()
        pins = _pins_of_others(name, own)
        self._seals = SecureChannel(
            name, session, agreed, own.identity, pins, own.trust_server
        )
        ring, padding = invitation.ring, invitation.padding
        kind = METHODS[invitation.method]
        self._member = Member(
            kind(name, ring, messages, group, session, padding, self._count)
        )
        part = max(1, invitation.part_bytes // group.size)
        self._part_bytes = part * group.size + TAG_BYTES
        self._post = ChunkCodec(self._seals, group, part)
        self._outbox: deque[tuple[RoundMessage, int]] = deque()  # with the next part
        self._met = False

    def _count(self, exponentiations: int) -> None:
        self.exponentiations += exponentiations

    def hello(self) -> Hello:
        """Return what the other parties need to seal letters to this one."""
        return self._seals.hello()

    def meet(self, hellos: Sequence[Hello]) -> None:
        """Agree on keys with the other parties and write the first letters."""
        names = sorted(hello.sender for hello in hellos)
        if self._met or names != sorted(self.invitation.ring):
            raise PartyError(
                self.name, f"got the hellos of {names} in the handshake", REMEDY
            )
        self._seals.meet(hellos)
        self._met = True
        self._outbox.extend((letter, 0) for letter in self._member.open())

    def take(self, parts: Sequence[Sealed]) -> None:
        """Take parts of letters in, and write what follows from whole letters."""
        for part in parts:
            letter = self._post.receive(part)
            if letter is not None:
                following = self._member.take(letter)
                self._outbox.extend((letter, 0) for letter in following)

    def give(self, limit: int) -> list[Sealed]:
        """Return the next parts of letters from this party."""
        parts: list[Sealed] = []
        size = 0
        while self._outbox and (not parts or size + self._part_bytes <= limit):
            letter, number = self._outbox.popleft()
            parts.append(self._post.seal(letter, number))
            size += len(parts[-1].content)
            if number + 1 < self._post.parts(letter):
                self._outbox.appendleft((letter, number + 1))
        return parts

    @property
    def has_more(self) -> bool:
        """Whether there is something left to `give`."""
        return bool(self._outbox)

    def finish(self) -> KeptAlignment:
        """Forget everything but the alignment and return it."""
        missing, found = self._member.missing(), self._member.alignment
        self.close()
        if missing is not None:
            sender, phase = missing
            raise PartyError(
                sender,
                f"its {phase} list has not arrived at '{self.name}', or not all of it",
                REMEDY,
            )
        assert found is not None  # all lists have come
        return KeptAlignment(found, found.fingerprint(self.invitation.agreed()))

    def close(self) -> None:
        """Forget the keys and all lists."""
        self._member.close()
        self._seals.close()
        self._post.close()
        self._outbox.clear()

    def save(self) -> bytes:
        """Return the handshake as bytes: secrets of this session, and no id."""
        letters = [[vars(letter), number] for letter, number in self._outbox]
        invitation = {**vars(self.invitation), "session": self.invitation.session.hex()}
        state = {
            "invitation": {**invitation, "ring": list(self.invitation.ring)},
            "exponentiations": self.exponentiations,
            "met": self._met,
            "seals": self._seals.state_dict(),
            "member": self._member.state_dict(),
            "post": self._post.state_dict(),
            "outbox": letters,
        }
        return to_bytes(_tensors(state))

    @classmethod
    def restore(
        cls, data: bytes, name: str, own: AlignmentSettings, ids: Any
    ) -> Handshake:
        """Return a handshake that goes on where it was saved."""
        state = _arrays(from_bytes(data))
        given = state["invitation"]
        given["session"], given["ring"] = (
            bytes.fromhex(given["session"]),
            tuple(given["ring"]),
        )
        messages = [] if state["met"] else ids_of(name, ids, own)
        made = cls(name, Invitation(**given), own, messages)
        made.exponentiations, made._met = state["exponentiations"], state["met"]
        made._seals.load_state_dict(state["seals"])
        made._member.load_state_dict(state["member"])
        made._post.load_state_dict(state["post"])
        made._outbox.extend((RoundMessage(**kept), n) for kept, n in state["outbox"])
        return made


def ids_of(name: str, ids: Any, own: AlignmentSettings) -> list[bytes]:
    """Return a party's ids as a handshake takes them."""
    if ids is None:
        raise PartyError(
            name, "has no ids to align", "Give it the id of each of its rows"
        )
    return encode_ids(ids, own.normalise)


def _pins_of_others(name: str, own: AlignmentSettings) -> dict[str, bytes] | None:
    """Return the pins without the party's own, which must then be right."""
    if own.pins is None:
        return None
    mine = own.pins.get(name)
    if mine is not None and own.identity is not None and mine != own.identity.public:
        raise ConfigError(f"the key that is pinned for '{name}' is not its own key")
    return {other: key for other, key in own.pins.items() if other != name}


@dataclass(frozen=True, eq=False)
class KeptAlignment:
    """A finished alignment beside the party's checkpoints, for runs that go on."""

    alignment: Alignment
    fingerprint: str

    def save(self, store: Store) -> None:
        """Keep it."""
        state = {
            "alignment": self.alignment.state_dict(),
            "fingerprint": self.fingerprint,
        }
        store.save(TAG, _tensors(state))

    @classmethod
    def load(cls, store: Store) -> KeptAlignment | None:
        """Return what was kept, None if nothing was."""
        if TAG not in store.tags():
            return None
        state = _arrays(store.load(TAG))
        return cls(Alignment.from_state(state["alignment"]), state["fingerprint"])


def _tensors(state: Any) -> Any:
    """Return a state with tensors in place of arrays, as checkpoints have them."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(np.require(state, requirements=["C", "W"]))
    if isinstance(state, Mapping):
        return {key: _tensors(value) for key, value in state.items()}
    return [_tensors(value) for value in state] if isinstance(state, list) else state


def _arrays(state: Any) -> Any:
    """Return a state with arrays in place of tensors."""
    if isinstance(state, Tensor):
        return state.numpy()
    if isinstance(state, Mapping):
        return {key: _arrays(value) for key, value in state.items()}
    return [_arrays(value) for value in state] if isinstance(state, list) else state
