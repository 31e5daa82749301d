"""A party's side of the alignment handshake, and the alignment that it saves.

Lists (`Member`) become encrypted chunks (`ChunkCodec`) that fit into messages, and the
state can be saved between two messages. Everything random is drawn at the start: a step
that is repeated after a crash gives the same chunks, and no nonce is ever used for two
contents.
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
from flower_vfl.parties.checkpoints import (
    DamagedError,
    RecordStore,
    from_bytes,
    to_bytes,
)

from .channel import ChunkCodec, SecureChannel
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
from .psu import METHODS, AlignedIds
from .ring import Member

CHECKPOINT = "alignment"  # tag of the checkpoint with a finished alignment
TAG_BYTES = 16  # that encryption adds to a chunk


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
            raise PartyError(
                name,
                f"does not take part in '{config.method}', only in "
                f"{' and '.join(own.methods)}",
                "Choose another alignment, or change alignment-methods of that node",
            )
        self.name = name
        self.config = config
        group = make_group(config.group)
        session, pins = config.session, own.pins_of_others(name)
        self._channel = SecureChannel(
            name, session, config.agreed(), own.identity, pins, own.trust_server
        )
        kind = METHODS[config.method]
        self._member = Member(
            kind(name, config.ring, ids, group, session, config.padding)
        )
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
            raise PartyError(
                self.name, f"got the hellos of {names} in the handshake", REMEDY
            )
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
            raise PartyError(
                sender,
                f"its {phase} list has not arrived at '{self.name}', or not all of it",
                REMEDY,
            )
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
        raise PartyError(
            name, "has no ids to align", "Give it the id of each of its rows"
        )
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
