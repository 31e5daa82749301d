"""The node's side of a session: connect, authenticate, answer, reconnect."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import fields
from logging import DEBUG, ERROR, INFO, WARNING
from queue import SimpleQueue
from typing import Any, Final

import grpc
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from flower_vfl.errors import ConfigError
from flower_vfl.protocol.residence import RESIDENT

from . import wire
from .authentication import Authentication, RefusedError, read_frame
from .event_loop import SendQueue, flush
from .settings import (
    METHOD,
    SessionOffer,
    is_loopback,
    split_address,
    transport_options,
)
from .wire import Assembler, Buffer, WireError

_FIRST_DELAY: Final = 0.05
_LAST_DELAY: Final = 1.0
_FINAL: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


class ResidentContext(Context):
    """The context of a node that stays in memory; its copies are ordinary contexts.

    Flower's own object never gets the mark, because Ray pickles it with the reply that
    opens a session, and a blocking session hands it back to Flower.
    """

    def __init__(self, context: Context) -> None:
        self.__dict__.update(context.__dict__)
        self.__dict__[RESIDENT] = True

    def __reduce__(self) -> tuple[type[Context], tuple[Any, ...]]:
        """Leave the mark behind in a deep copy and in another process."""
        return Context, tuple(getattr(self, field.name) for field in fields(Context))


class Executor:
    """Answers the requests of sessions, one at a time, in the thread that runs it.

    All sessions of a Ray actor share one. Flower promises an app that an actor handles
    one message at a time, and torch then starts its threads once.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[NodeSession, memoryview] | None]
        self._requests = SimpleQueue()

    def submit(self, session: NodeSession, frame: memoryview) -> None:
        """Queue a request."""
        self._requests.put((session, frame))

    def shutdown(self) -> None:
        """Make `run` return once the queue is empty."""
        self._requests.put(None)

    def run(self) -> None:
        """Answer requests until `shutdown` is called."""
        for session, frame in iter(self._requests.get, None):
            try:
                session.answer(frame)
            except Exception as ex:  # the other sessions go on
                session.end(f"cannot answer: {type(ex).__name__}: {ex}")


class NodeSession:
    """The session of one node with one server."""

    def __init__(
        self, app: ClientApp, context: Context, offer: SessionOffer, executor: Executor
    ) -> None:
        host, _ = split_address(offer.address)
        if context.node_config.get("require-tls") and not offer.certificate:
            raise ConfigError(
                f"the grid at {offer.address} has no certificate, and this node wants "
                "one (require-tls): give the ResidentGrid a certificate"
            )
        if not offer.certificate and not (offer.insecure or is_loopback(host)):
            raise ConfigError(
                f"refusing plaintext to {offer.address}: it is not this machine. Give "
                "the ResidentGrid a certificate, or `insecure=True` to allow it"
            )
        self.context = ResidentContext(context)
        self.handled = 0
        self._app = app
        self._offer = offer
        self._executor = executor
        self._local = is_loopback(host)
        self._end_reason: str | None = None
        self._queue: SendQueue | None = None  # of the current connection
        self._connections = 0
        self._received = self._answered = 0
        self._active_at = time.monotonic()
        # The server may ask again for the replies since the oldest unanswered request.
        self._replies: dict[int, list[Buffer]] = {}
        self._oldest = 0

    async def run(self) -> str:
        """Serve the session until it ends; return the reason."""
        node_id = self.context.node_id
        idle_check = asyncio.ensure_future(self._check_idle())
        try:
            reason = await self._stay_connected()
        except Exception as ex:
            log(ERROR, "Session of node %s failed", node_id, exc_info=ex)
            reason = f"{type(ex).__name__}: {ex}"
        finally:
            idle_check.cancel()
        log(INFO, "Session of node %s ended: %s", node_id, reason)
        return reason

    async def _stay_connected(self) -> str:
        """Reconnect until the session ends or the server stays away too long."""
        disconnected_at, timeout = time.monotonic(), self._offer.connect_timeout
        delay = _FIRST_DELAY
        while self._end_reason is None:
            before = self._connections
            reason = await self._serve_connection()
            if reason is not None:
                return reason
            if self._connections > before:
                disconnected_at = time.monotonic()
                timeout, delay = self._offer.limits.silence, _FIRST_DELAY
            if time.monotonic() - disconnected_at > timeout:
                return f"no server at {self._offer.address} for {timeout:g} s"
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)
        return self._end_reason

    async def _serve_connection(self) -> str | None:
        """Use one connection while it lasts; return the reason if the session ends."""
        queue = SendQueue()
        writer: asyncio.Future[None] | None = None
        async with self._channel() as channel:
            call = channel.stream_stream(METHOD)()
            try:
                async with asyncio.timeout(self._offer.limits.authenticate):
                    await self._authenticate(call)
                self._connections += 1
                self._active_at = time.monotonic()
                self._queue = queue
                writer = asyncio.ensure_future(_write(call, queue))
                return await self._read(call)
            except grpc.RpcError as ex:
                if ex.code() in _FINAL:
                    return f"refused by {self._offer.address}"
                self._log_loss(ex.code())
            except (ConnectionError, TimeoutError) as ex:
                self._log_loss(repr(ex))
            except (RefusedError, WireError) as ex:
                return str(ex)
            finally:
                self._queue = None
                if writer is not None:
                    writer.cancel()
                call.cancel()
        return None

    def _log_loss(self, problem: object) -> None:
        # While the node tries to connect, failed attempts are expected.
        level = DEBUG if self._queue is None else INFO
        log(level, "Session of node %s: %s", self.context.node_id, problem)

    def _channel(self) -> grpc.aio.Channel:
        options = [
            *transport_options(self._offer.limits),
            # A new connection each time, without the back-off of another channel.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0 if self._local else 1),
        ]
        address = self._offer.address
        if not self._offer.certificate:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(self._offer.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    async def _authenticate(self, call: grpc.aio.StreamStreamCall) -> None:
        token = self._offer.token
        node = Authentication(self.context.run_id, self.context.node_id)
        await call.write(wire.split_frame([node.hello()])[0])
        node.server_nonce = bytes(await read_frame(call))
        await call.write(wire.split_frame([node.node_proof(token)])[0])
        node.check_server(token, await read_frame(call))

    async def _read(self, call: grpc.aio.StreamStreamCall) -> str | None:
        assembler = Assembler(self._offer.limits.max_frame)
        while (chunk := await call.read()) is not grpc.aio.EOF:
            frame = assembler.feed(chunk)
            reason = None if frame is None else self._on_frame(frame)
            if reason is not None:
                return reason
        return None

    def _on_frame(self, frame: memoryview) -> str | None:
        """Handle a frame; return the reason if it ends the session."""
        kind = bytes(frame[:1])
        if kind == wire.REQUEST:
            self._received += 1
            self._executor.submit(self, frame)
            return None
        if kind == wire.END:
            return self._end_reason or bytes(frame[1:]).decode(errors="replace")
        raise WireError("the server sent a frame of an unknown kind")

    async def _check_idle(self) -> None:
        """End the session if it is connected and idle for too long."""
        idle = self._offer.limits.idle
        while self._end_reason is None:
            left = self._active_at + idle - time.monotonic()
            if self._received > self._answered or self._queue is None:
                left = idle
            if left <= 0:
                self.end(f"no message for {idle:g} s")
            await asyncio.sleep(left)

    def end(self, reason: str) -> None:
        """End the session from this side."""
        self._end_reason = reason
        queue = self._queue
        if queue is not None:
            # The server answers this frame by ending the stream.
            queue.put(wire.END, reason.encode())
            queue.close()

    def answer(self, frame: memoryview) -> None:
        """Answer a request; repeat the reply if it was answered before."""
        try:
            self._answer(*wire.read_frame_head(frame))
        finally:
            self._answered += 1
            self._active_at = time.monotonic()

    def _answer(self, sequence: int, oldest: int, payload: memoryview) -> None:
        if oldest > self._oldest:
            self._oldest = oldest
            for old in [number for number in self._replies if number < oldest]:
                del self._replies[old]
        if sequence < self._oldest:
            return
        reply = self._replies.get(sequence)
        if reply is None:
            reply = self._replies[sequence] = self._handle(payload)
            self.handled += 1
        queue = self._queue
        # Without a connection the server asks again later.
        if queue is not None:
            queue.put(wire.frame_head(wire.REPLY, sequence), *reply)
            flush([queue])

    def _handle(self, payload: memoryview) -> list[Buffer]:
        message = wire.decode(payload)
        reply = call_app(self._app, message, self.context)
        limit = self._offer.limits.max_frame
        parts = wire.encode(reply, self._offer.wire_dtype or None)
        if wire.size(parts) + wire.FRAME_OVERHEAD > limit:
            text = f"the reply has {wire.size(parts)} bytes, over the limit of {limit}"
            log(WARNING, "Node %s: %s", self.context.node_id, text)
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
            parts = wire.encode(Message(error, reply_to=message))
        return parts


def call_app(app: ClientApp, message: Message, context: Context) -> Message:
    """Call a ClientApp; an exception becomes the error reply that Flower would send."""
    try:
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}")
    except BaseException as ex:
        # A signal ends a client process. In a Ray actor it ends only the call.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and not isinstance(ex, Exception):
            raise
        log(ERROR, "ClientApp raised an exception", exc_info=ex)
        reason = f"{type(ex)}:<'{ex}'>"
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
        reply = Message(error, reply_to=message)
    return reply


async def _write(call: grpc.aio.StreamStreamCall, queue: SendQueue) -> None:
    # The reader gets the same errors and reports them.
    with suppress(grpc.RpcError, asyncio.InvalidStateError):
        await queue.drain(call.write)
        await call.done_writing()
