"""One node as the server sees it, and the frames that travel once it is admitted."""

from __future__ import annotations

import struct
import time
from typing import Final

from flwr.app import Message

from .loop import Outbox, flush
from .wire import Buffer, WireError

REQUEST: Final = b"Q"
REPLY: Final = b"R"
BYE: Final = b"B"
_REQUEST_HEAD: Final = struct.Struct("<cQQ")
_REPLY_HEAD: Final = struct.Struct("<cQ")


def request_head(sequence: int, floor: int) -> bytes:
    """Return the head of a request."""
    return _REQUEST_HEAD.pack(REQUEST, sequence, floor)


def read_request(frame: memoryview) -> tuple[int, int, memoryview]:
    """Return number, floor and payload of a request frame."""
    _, sequence, floor = _REQUEST_HEAD.unpack_from(frame)
    return sequence, floor, frame[_REQUEST_HEAD.size :]


def reply_head(sequence: int) -> bytes:
    """Return the head of the reply to the request of that number."""
    return _REPLY_HEAD.pack(REPLY, sequence)


def read_reply(frame: memoryview) -> tuple[int, memoryview]:
    """Return number and payload of a reply frame."""
    if len(frame) < _REPLY_HEAD.size:
        raise WireError("garbage instead of a reply")
    _, sequence = _REPLY_HEAD.unpack_from(frame)
    return sequence, frame[_REPLY_HEAD.size :]


class Request:
    """A message on its way."""

    def __init__(self, message: Message, payload: list[Buffer]) -> None:
        self.message = message
        self.payload = payload
        metadata = message.metadata
        self.expires = time.monotonic() + (
            metadata.created_at + metadata.ttl - time.time()
        )


class Connection(Outbox):
    """One live stream of an admitted node."""

    def __init__(self, peer: str) -> None:
        super().__init__()
        self.peer = peer


class Link:
    """Everything the server knows about one node; guarded by the grid's lock."""

    def __init__(self, run_id: int, node_id: int) -> None:
        self.run_id = run_id
        self.node_id = node_id
        self.connection: Connection | None = None
        self.lost_at: float | None = None
        self.ended: str | None = None
        self.unanswered: dict[int, Request] = {}
        self._next = 0

    @property
    def is_expected(self) -> bool:
        """Whether the node may connect now."""
        return self.connection is None and self.ended is None

    def post(self, request: Request) -> None:
        """Queue a request; it leaves with `loop.flush`, or when the node is back."""
        sequence = self._next
        self._next += 1
        self.unanswered[sequence] = request
        if self.connection is not None:
            self._send(self.connection, sequence)

    def forget(self, request: Request) -> None:
        """Drop a request that nobody waits for any more."""
        for sequence, pending in self.unanswered.items():
            if pending is request:
                del self.unanswered[sequence]
                return

    def attach(self, connection: Connection) -> None:
        """Take a connection and send what the node has not answered yet."""
        self.connection, self.lost_at = connection, None
        for sequence in self.unanswered:
            self._send(connection, sequence)
        flush([connection])

    def _send(self, connection: Connection, sequence: int) -> None:
        floor = next(iter(self.unanswered))
        payload = self.unanswered[sequence].payload
        connection.add(request_head(sequence, floor), *payload)


def is_live(link: Link | None) -> bool:
    """Return whether there is a session that has not ended."""
    return link is not None and link.ended is None
