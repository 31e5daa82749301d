"""The server's side of sessions: requests without a reply, and replies to collect."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from logging import WARNING
from typing import Final
from uuid import uuid4

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from flower_vfl.protocol.lazy_array import Buffer

from . import wire
from .event_loop import SendQueue, flush
from .executor import ReadingCondition
from .local_socket import LocalConnection
from .settings import Limits
from .wire import WireError

Connection = SendQueue | LocalConnection

_LONGEST: Final = 24 * 3600.0  # one wait, in seconds; epoll takes up to 24 days
_LARGE: Final = 64 << 10


@dataclass
class Request:
    """A message to a node, and the messages that `wait` waits for together with it."""

    message: Message
    payload: list[Buffer]
    session: ServerSession
    group: set[str]
    sequence: int = 0

    def __post_init__(self) -> None:
        metadata = self.message.metadata
        remaining = metadata.created_at + metadata.ttl - time.time()
        self.expires = time.monotonic() + remaining


@dataclass(eq=False)
class ServerSession:
    """The server's state of the session with one node; guarded by the grid's lock."""

    run_id: int
    node_id: int
    number: int  # in its frames
    connection: Connection | None = None
    # That its requests use: the one of another node of the same process, once the node
    # has answered on its own, and so has authenticated the server too.
    carrier: Connection | None = None
    disconnected_at: float | None = None
    end_reason: str | None = None
    unanswered: dict[int, Request] = field(default_factory=dict)
    _next: int = 0

    @property
    def is_expected(self) -> bool:
        """Whether the node is expected to connect."""
        return self.connection is None and self.end_reason is None

    def send(self, request: Request) -> None:
        """Queue a request; it leaves with `flush`, or when the node reconnects."""
        request.sequence = self._next
        self._next += 1
        self.unanswered[request.sequence] = request
        if self.carrier is not None:
            self._put(self.carrier, request)

    def connect(self, connection: Connection) -> None:
        """Use a connection of its own and repeat all unanswered requests on it."""
        self.connection = self.carrier = connection
        self.disconnected_at = None
        for request in self.unanswered.values():
            self._put(connection, request)
        flush([connection])

    def _put(self, connection: Connection, request: Request) -> None:
        oldest = next(iter(self.unanswered))
        numbers = self.number, request.sequence, oldest
        connection.put(wire.frame_head(wire.REQUEST, *numbers), *request.payload)


class PendingRequests:
    """The unanswered requests and uncollected replies of one grid."""

    end_session: Callable[[ServerSession, str], None]  # of the server

    def __init__(self, limits: Limits, wire_dtype: str | None) -> None:
        self.condition = ReadingCondition()
        self._limits = limits
        self._wire_dtype = wire_dtype
        self._replies: dict[str, Message] = {}  # in order of arrival
        self._pending: dict[str, Request] = {}
        self._ids = map(f"{uuid4().hex[:16]}{{:016x}}".format, count())

    def send(
        self, messages: list[Message], find: Callable[[int], ServerSession | str]
    ) -> set[str]:
        """Send messages; return the ids of those that wait for a reply."""
        group: set[str] = set()
        unsent: list[Connection] = []
        for message in messages:
            metadata = message.metadata
            if metadata.reply_to_message_id != "" or metadata.ttl <= 0:
                raise ValueError(f"Invalid message: {message}")
            metadata.__dict__["_message_id"] = next(self._ids)
        for message in messages:
            metadata = message.metadata
            payload = wire.encode(message, self._wire_dtype)
            excess = wire.size(payload) + wire.FRAME_OVERHEAD - self._limits.max_frame
            with self.condition:
                session = find(metadata.dst_node_id)
                if isinstance(session, str):
                    self._add_error(message, f"has no session: {session}")
                elif session.end_reason is not None:
                    self._add_error(message, f"lost its session: {session.end_reason}")
                elif excess > 0:
                    text = f"was not sent a message {excess} bytes over the limit"
                    self._add_error(message, text)
                else:
                    group.add(metadata.message_id)
                    request = Request(message, payload, session, group)
                    self._pending[metadata.message_id] = request
                    session.send(request)
                    if session.carrier is not None:
                        unsent.append(session.carrier)
            # A call of the kernel, or waking the loop, costs more than a small message.
            # A large message leaves while the next one is encoded.
            if wire.size(payload) > _LARGE:
                flush(unsent)
                unsent = []
        flush(unsent)
        return group

    def receive(
        self, session: ServerSession, sequence: int, payload: memoryview
    ) -> None:
        """Take the reply to a request."""
        request = session.unanswered.get(sequence)
        if request is None:  # it was repeated, or came too late
            return
        try:
            reply = _checked(wire.decode(payload), request.message)
        except WireError as problem:
            text = f"node {session.node_id} sent a bad reply: {problem}"
            log(WARNING, "Session: %s", text)
            reply = Message(Error(ErrorCode.UNKNOWN, text), reply_to=request.message)
        with self.condition:
            if session.unanswered.pop(sequence, None) is not None:
                self._add_reply(request.message, reply)

    def collect(self, message_ids: set[str]) -> list[Message]:
        """Remove and return the replies that have arrived, in order of arrival."""
        with self.condition:
            self.expire()
            arrived = [i for i in self._replies if i in message_ids]
            return [self._replies.pop(i) for i in arrived]

    def wait(
        self, message_ids: set[str], deadline: float | None, *, first: bool = False
    ) -> None:
        """Wait until a group has all its replies or errors; with `first`, until one."""
        # The replies to messages that were sent together wake it once all are there.
        with self.condition:
            self.expire()
            while message_ids <= self._pending.keys() if first else message_ids:
                left = _LONGEST if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return
                self.condition.wait(min(left, self._next_expiry(message_ids)))
                self.expire()

    def expire(self) -> None:
        """Add an error for each request that cannot be answered; lock held."""
        now = time.monotonic()
        for request in list(self._pending.values()):
            session = request.session
            since = session.disconnected_at
            away = 0.0 if since is None else now - since
            if session.end_reason is None and away > self._limits.silence:
                text = f"disconnected for {self._limits.silence:g} s"
                self.end_session(session, text)
            if session.end_reason is not None:
                text = f"lost its session: {session.end_reason}"
            elif now > request.expires:
                text = "did not answer before the TTL of the message expired"
            else:
                continue
            self._add_error(request.message, text)
            session.unanswered.pop(request.sequence, None)

    def _next_expiry(self, message_ids: set[str]) -> float:
        """Return the seconds until a request may expire; lock held."""
        now = time.monotonic()
        left = _LONGEST
        for message_id in message_ids:
            request = self._pending[message_id]
            since = request.session.disconnected_at
            left = min(left, request.expires - now)
            if since is not None:
                left = min(left, since + self._limits.silence - now)
        return max(left, 0.0) + 0.001

    def _add_reply(self, message: Message, reply: Message) -> None:
        """Keep a reply; notify waiting threads if its group is complete; lock held."""
        reply.metadata.__dict__["_message_id"] = next(self._ids)
        message_id = message.metadata.message_id
        self._replies[message_id] = reply
        request = self._pending.pop(message_id, None)
        if request is not None:
            request.group.discard(message_id)
            if not request.group:
                self.condition.notify_all()

    def _add_error(self, message: Message, problem: str) -> None:
        """Keep an error reply that names the node; lock held."""
        reason = f"node {message.metadata.dst_node_id} {problem}"
        error = Error(ErrorCode.NODE_UNAVAILABLE, reason)
        self._add_reply(message, Message(error, reply_to=message))


def _checked(reply: Message, message: Message) -> Message:
    """Return the reply if it answers this message and comes from its receiver."""
    got, sent = reply.metadata, message.metadata
    expected = sent.run_id, sent.dst_node_id, sent.message_id
    if (got.run_id, got.src_node_id, got.reply_to_message_id) != expected:
        raise WireError("it does not answer the message that was sent")
    return reply
