"""Messages that are out, replies that are in, and the wait in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from logging import WARNING
from typing import Final
from uuid import uuid4

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from .links import Connection, Link, Request
from .loop import flush
from .settings import Limits
from .wire import WireError, decode, encode, size

_FOREVER: Final = 365 * 24 * 3600.0
_LARGE: Final = 64 << 10
_HEADROOM: Final = 64
"""Bytes of a frame beside its payload, rounded up."""


class PendingRequests:
    """The messages of one grid."""

    def __init__(
        self,
        limits: Limits,
        wire_dtype: str | None,
        end: Callable[[Link, str], None],
    ) -> None:
        self.news = threading.Condition()
        self._limits = limits
        self._wire_dtype = wire_dtype
        self._end = end
        # In order of arrival, which a dict keeps.
        self._arrived: dict[str, Message] = {}
        # With each message, those that are awaited together with it.
        self._awaited: dict[str, tuple[Link, Request, set[str]]] = {}

    def post(
        self, messages: list[Message], find: Callable[[int], Link | str]
    ) -> set[str]:
        """Send messages over their links; return the ids that are awaited."""
        together: set[str] = set()
        unsent: list[Connection] = []
        for message in messages:
            metadata = message.metadata
            if metadata.reply_to_message_id != "" or metadata.ttl <= 0:
                raise ValueError(f"Invalid message: {message}")
            metadata.__dict__["_message_id"] = uuid4().hex
        for message in messages:
            metadata = message.metadata
            request = Request(message, encode(message, self._wire_dtype))
            over = size(request.payload) + _HEADROOM - self._limits.max_frame
            with self.news:
                link = find(metadata.dst_node_id)
                if isinstance(link, str):
                    self._fail(message, f"has no session: {link}")
                elif link.ended is not None:
                    self._fail(message, f"has no session any more: {link.ended}")
                elif over > 0:
                    self._fail(message, f"would get {over} bytes more than the limit")
                else:
                    together.add(metadata.message_id)
                    self._awaited[metadata.message_id] = (link, request, together)
                    link.post(request)
                    if link.connection is not None:
                        unsent.append(link.connection)
            # Waking the loop costs more than a small message; a large one may leave
            # while the next is encoded.
            if size(request.payload) > _LARGE:
                flush(unsent)
                unsent = []
        flush(unsent)
        return together

    def answered(self, link: Link, sequence: int, payload: memoryview) -> None:
        """Take a reply; called by the thread of the node's stream."""
        request = link.unanswered.get(sequence)
        if request is None:  # it was repeated, or came too late
            return
        try:
            reply = _checked(decode(payload), request.message)
        except WireError as problem:
            text = f"node {link.node_id} sent a bad reply: {problem}"
            log(WARNING, "Session: %s", text)
            reply = Message(Error(ErrorCode.UNKNOWN, text), reply_to=request.message)
        reply.metadata.__dict__["_message_id"] = uuid4().hex
        with self.news:
            if link.unanswered.pop(sequence, None) is not None:
                self._arrive(request.message, reply)

    def collect(self, message_ids: set[str]) -> list[Message]:
        """Return the replies to these messages that are in, in order of arrival."""
        with self.news:
            self.fit()
            here = [i for i in self._arrived if i in message_ids]
            return [self._arrived.pop(i) for i in here]

    def wait(self, together: set[str], end: float | None) -> None:
        """Wait until all of these messages have a reply or an error."""
        with self.news:
            self.fit()
            while together:
                left = _FOREVER if end is None else end - time.monotonic()
                if left <= 0:
                    return
                self.news.wait(min(left, self._next_due(together)))
                self.fit()

    def fit(self) -> None:
        """Turn messages that nobody can answer any more into errors; lock held."""
        now = time.monotonic()
        for link, request, _ in list(self._awaited.values()):
            lost_for = 0.0 if link.lost_at is None else now - link.lost_at
            if link.ended is None and lost_for > self._limits.silence:
                self._end(link, f"away for {self._limits.silence:g} s")
            if link.ended is not None:
                self._fail(request.message, f"has no session any more: {link.ended}")
            elif now > request.expires:
                self._fail(request.message, "did not answer before the TTL ran out")
            else:
                continue
            link.forget(request)

    def _next_due(self, message_ids: set[str]) -> float:
        """Return the seconds until `fit` may have something to do; lock held."""
        due = _FOREVER
        now = time.monotonic()
        for message_id in message_ids:
            link, request, _ = self._awaited[message_id]
            due = min(due, request.expires - now)
            if link.lost_at is not None:
                due = min(due, link.lost_at + self._limits.silence - now)
        return max(due, 0.0) + 0.001

    def _arrive(self, message: Message, reply: Message) -> None:
        """File a reply; wake who waits if it was the last one; lock held."""
        message_id = message.metadata.message_id
        self._arrived[message_id] = reply
        awaited = self._awaited.pop(message_id, None)
        if awaited is not None:
            together = awaited[2]
            together.discard(message_id)
            if not together:
                self.news.notify_all()

    def _fail(self, message: Message, problem: str) -> None:
        """File an error that names the node where its reply would be; lock held."""
        reason = f"node {message.metadata.dst_node_id} {problem}"
        reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message)
        reply.metadata.__dict__["_message_id"] = uuid4().hex
        self._arrive(message, reply)


def _checked(reply: Message, message: Message) -> Message:
    """Return the reply if it is one to this message, from the node that got it."""
    got, sent = reply.metadata, message.metadata
    if (got.run_id, got.src_node_id, got.reply_to_message_id) != (
        sent.run_id,
        sent.dst_node_id,
        sent.message_id,
    ):
        raise WireError("not the reply to the message that was sent")
    return reply
