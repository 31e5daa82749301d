"""Lists in encrypted chunks, which fit into messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .channel import ChannelError, SecureChannel
from .elements import Group
from .messages import REMEDY, EncryptedChunk, Header, RoundMessage


@dataclass
class _Partial:
    """A list of which some chunks have come."""

    header: Header  # of its first chunk
    chunks: int
    content: bytearray


class ChunkCodec:
    """Splits the lists that a party sends, and joins those that it receives."""

    def __init__(self, channel: SecureChannel, group: Group, rows: int) -> None:
        self._channel = channel
        self._group = group
        self._rows = rows  # most elements in a chunk
        self._partial: dict[str, _Partial] = {}

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
        partial = self._partial.setdefault(sender, _Partial(header, 0, bytearray()))
        partial.chunks += 1
        partial.content += content
        size, whole = len(partial.content), header.count * self._group.size
        same = replace(partial.header, chunk=header.chunk) == header
        if not same or partial.chunks != header.chunk + 1 or size > whole:
            raise ChannelError(sender, "has mixed the chunks of two lists", REMEDY)
        if partial.chunks < header.chunks:
            return None
        del self._partial[sender]
        if size != whole or partial.chunks > header.chunks:
            problem = f"has not sent the {header.count} elements that it announced"
            raise ChannelError(sender, problem, REMEDY)
        header = replace(header, chunk=0, chunks=1)
        return RoundMessage(header, self._group.decode(partial.content))

    def close(self) -> None:
        """Forget the chunks of incomplete lists."""
        self._partial.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the incomplete lists as plain values and arrays."""
        return {
            sender: {
                "header": partial.header.to_list(),
                "chunks": partial.chunks,
                "content": np.array(partial.content, np.uint8),
            }
            for sender, partial in self._partial.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same party and session."""
        self._partial = {
            sender: _Partial(
                Header.from_list(saved["header"]),
                saved["chunks"],
                bytearray(saved["content"]),
            )
            for sender, saved in state.items()
        }
