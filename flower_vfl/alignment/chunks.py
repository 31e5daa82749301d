"""Lists in encrypted chunks, which fit into messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .channel import ChannelError, SecureChannel
from .elements import Group
from .messages import REMEDY, EncryptedChunk, Header, RoundMessage


class ChunkCodec:
    """Splits the lists that a party sends, and joins those that it receives."""

    def __init__(self, channel: SecureChannel, group: Group, rows: int) -> None:
        self._channel = channel
        self._group = group
        self._rows = rows  # most elements in a chunk
        # by sender: the header that must come next, and what has come before it
        self._partial: dict[str, tuple[Header, bytearray]] = {}

    def chunks(self, message: RoundMessage) -> int:
        """Return the number of chunks of a list."""
        return max(1, -(-len(message.elements) // self._rows))

    def encode(self, message: RoundMessage, chunk: int) -> EncryptedChunk:
        """Return one encrypted chunk of a list; chunks must be encoded in order."""
        header = replace(message.header, chunk=chunk, chunks=self.chunks(message))
        start = chunk * self._rows
        rows = message.elements[start : start + self._rows]
        return self._channel.encrypt(header, self._group.encode(rows))

    def decode(self, chunk: EncryptedChunk) -> RoundMessage | None:
        """Return the whole list after its last chunk, None before."""
        content = self._channel.decrypt(chunk)
        header, sender = chunk.header, chunk.header.sender
        start = replace(header, chunk=0), bytearray()
        awaited, received = self._partial.pop(sender, start)
        received += content
        size, whole = len(received), header.count * self._group.size
        if header != awaited or size > whole:
            raise ChannelError(sender, "has mixed the chunks of two lists", REMEDY)
        number = header.chunk + 1
        if number < header.chunks:
            self._partial[sender] = replace(header, chunk=number), received
            return None
        if size != whole or number != header.chunks:
            problem = f"has not sent the {header.count} elements that it announced"
            raise ChannelError(sender, problem, REMEDY)
        header = replace(header, chunk=0, chunks=1)
        return RoundMessage(header, self._group.decode(received))

    def close(self) -> None:
        """Forget the chunks of incomplete lists."""
        self._partial.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the incomplete lists as plain values and arrays."""
        return {
            sender: [awaited.to_list(), np.array(received, np.uint8)]
            for sender, (awaited, received) in self._partial.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same party and session."""
        self._partial = {
            sender: (Header.from_list(awaited), bytearray(received))
            for sender, (awaited, received) in state.items()
        }
