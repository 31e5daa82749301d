"""The node's end of a session: dial out, prove, answer, come back when cut off."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from logging import DEBUG, ERROR, INFO, WARNING
from queue import SimpleQueue
from typing import Final

import grpc
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from flower_vfl.errors import ConfigError
from flower_vfl.protocol import residence

from .admission import MAX_HANDSHAKE, Handshake, Refusal
from .links import BYE, REQUEST, read_request, reply_head
from .loop import Outbox, flush
from .settings import (
    METHOD,
    SERVICE,
    Offer,
    is_loopback,
    split_address,
    transport_options,
)
from .wire import Assembler, Buffer, WireError, chunks, decode, encode, size

_FIRST_DELAY: Final = 0.05
_LAST_DELAY: Final = 1.0
_FINAL: Final = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)

Job = tuple["Session", int, int, memoryview]


class Executor:
    """Does the work of sessions, one message at a time, in the thread that runs it.

    All sessions of a Ray actor share one: an app may rely on Flower's promise that an
    actor handles one message at a time, and torch gets one team of threads instead of
    one for each party.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()

    def give(self, job: Job) -> None:
        """Queue a request."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Let `work` return once the queue is empty."""
        self._jobs.put(None)

    def work(self) -> None:
        """Answer requests until `stop` is called."""
        for session, sequence, floor, payload in iter(self._jobs.get, None):
            try:
                session.answer(sequence, floor, payload)
            except Exception as ex:  # never take the other sessions along
                session.give_up(f"cannot answer: {type(ex).__name__}: {ex}")


class Session:
    """One node's session with one server."""

    def __init__(
        self, app: ClientApp, context: Context, offer: Offer, hands: Executor
    ) -> None:
        host, _ = split_address(offer.address)
        if not offer.certificate and not (offer.insecure or is_loopback(host)):
            raise ConfigError(
                f"refusing plaintext to {offer.address}: it is not this machine. Give "
                "the ResidentGrid a certificate, or `insecure=True` to allow it"
            )
        self._app = app
        self._context = context
        self._offer = offer
        self._hands = hands
        self._local = is_loopback(host)
        self._over: str | None = None
        self._outbox: Outbox | None = None
        self._asked = self._done = 0
        self._active = time.monotonic()
        # Replies that the server may still ask for again.
        self._replies: dict[int, list[Buffer]] = {}
        self._floor = 0
        self.handled = 0
        self.connections = 0

    # --- the conversation -------------------------------------------------------

    async def run(self) -> str:
        """Keep the session until it ends; return why it ended."""
        run_id, node_id = self._context.run_id, self._context.node_id
        residence.mark(run_id, node_id)
        idle = asyncio.ensure_future(self._watch_idle())
        try:
            reason = await self._keep_talking()
        except Exception as ex:
            log(ERROR, "Session of node %s failed", node_id, exc_info=ex)
            reason = f"{type(ex).__name__}: {ex}"
        finally:
            idle.cancel()
            residence.unmark(run_id, node_id)
        log(INFO, "Session of node %s ended: %s", node_id, reason)
        return reason

    async def _keep_talking(self) -> str:
        alone_since, patience = time.monotonic(), self._offer.patience
        delay = _FIRST_DELAY
        while self._over is None:
            known = self.connections
            reason = await self._converse()
            if reason is not None:
                return reason
            if self.connections > known:
                alone_since, patience = time.monotonic(), self._offer.limits.silence
                delay = _FIRST_DELAY
            if time.monotonic() - alone_since > patience:
                return f"no server at {self._offer.address} for {patience:g} s"
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)
        return self._over

    async def _converse(self) -> str | None:
        """Use one connection for as long as it lasts.

        Returns the reason if the session is over, and None if it may go on with
        another connection.
        """
        outbox = Outbox()
        writer: asyncio.Future[None] | None = None
        async with self._channel() as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            try:
                async with asyncio.timeout(self._offer.limits.authenticate):
                    await self._introduce(call)
                self.connections += 1
                self._active = time.monotonic()
                self._outbox = outbox
                writer = asyncio.ensure_future(self._write(call, outbox))
                return await self._read(call)
            except grpc.RpcError as ex:
                if ex.code() in _FINAL:
                    return f"refused by {self._offer.address}"
                self._note_loss(ex.code())
            except (ConnectionError, TimeoutError) as ex:
                self._note_loss(repr(ex))
            except (Refusal, WireError) as ex:
                return str(ex)
            finally:
                self._outbox = None
                if writer is not None:
                    writer.cancel()
                call.cancel()
        return None

    def _note_loss(self, problem: object) -> None:
        # Before the first connection and between two, a failure is part of the plan.
        level = DEBUG if self._outbox is None else INFO
        log(level, "Session of node %s: %s", self._context.node_id, problem)

    def _channel(self) -> grpc.aio.Channel:
        options = [
            *transport_options(self._offer.limits),
            # A fresh connection each time, without another channel's back-off.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0 if self._local else 1),
        ]
        address = self._offer.address
        if not self._offer.certificate:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(self._offer.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    async def _introduce(self, call: grpc.aio.StreamStreamCall) -> None:
        handshake = Handshake(self._context.run_id, self._context.node_id)
        await call.write(chunks([handshake.hello()])[0])
        handshake.server_nonce = bytes(await _handshake_frame(call))
        await call.write(chunks([handshake.node_proof(self._offer.token)])[0])
        handshake.check_server(self._offer.token, await _handshake_frame(call))

    async def _read(self, call: grpc.aio.StreamStreamCall) -> str | None:
        assembler = Assembler(self._offer.limits.max_frame)
        while (chunk := await call.read()) is not grpc.aio.EOF:
            frame = assembler.feed(chunk)
            reason = None if frame is None else self._take(frame)
            if reason is not None:
                return reason
        return None

    async def _write(self, call: grpc.aio.StreamStreamCall, outbox: Outbox) -> None:
        # What goes wrong here goes wrong for the reader as well, which reports it.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await outbox.drain(call.write)
            await call.done_writing()

    async def _watch_idle(self) -> None:
        """End the session if it is connected and nothing has come for too long."""
        idle = self._offer.limits.idle
        while self._over is None:
            left = self._active + idle - time.monotonic()
            if self._asked > self._done or self._outbox is None:
                left = idle
            if left <= 0:
                self.give_up(f"no message for {idle:g} s")
            await asyncio.sleep(left)

    def give_up(self, reason: str) -> None:
        """End the session from this side."""
        self._over = reason
        outbox = self._outbox
        if outbox is not None:
            # The server answers a goodbye by ending the stream.
            outbox.add(BYE, reason.encode())
            outbox.end()

    def _take(self, frame: memoryview) -> str | None:
        kind = bytes(frame[:1])
        if kind == REQUEST:
            self._asked += 1
            sequence, floor, payload = read_request(frame)
            self._hands.give((self, sequence, floor, payload))
            return None
        if kind == BYE:
            said = bytes(frame[1:]).decode(errors="replace")
            return self._over or said
        raise WireError("the server sent neither a request nor a goodbye")

    # --- the work ---------------------------------------------------------------

    def answer(self, sequence: int, floor: int, payload: memoryview) -> None:
        """Answer a request, from memory if it was answered before."""
        try:
            self._answer(sequence, floor, payload)
        finally:
            self._done += 1
            self._active = time.monotonic()

    def _answer(self, sequence: int, floor: int, payload: memoryview) -> None:
        if floor > self._floor:
            self._floor = floor
            for old in [number for number in self._replies if number < floor]:
                del self._replies[old]
        if sequence < self._floor:
            return
        reply = self._replies.get(sequence)
        if reply is None:
            reply = self._replies[sequence] = self._handle(payload)
            self.handled += 1
        outbox = self._outbox
        # Without a connection the server will ask again, and find the reply here.
        if outbox is not None:
            outbox.add(reply_head(sequence), *reply)
            flush([outbox])

    def _handle(self, payload: memoryview) -> list[Buffer]:
        message = decode(payload)
        reply = call_app(self._app, message, self._context)
        limit = self._offer.limits.max_frame
        parts = encode(reply, self._offer.wire_dtype or None)
        if size(parts) + 64 > limit:
            text = f"the reply has {size(parts)} bytes, over the limit of {limit}"
            log(WARNING, "Node %s: %s", self._context.node_id, text)
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
            parts = encode(Message(error, reply_to=message))
        return parts


def call_app(app: ClientApp, message: Message, context: Context) -> Message:
    """Call a ClientApp; an exception becomes the error reply that Flower would send."""
    try:
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}")
    except BaseException as ex:
        # A signal to a client process ends it; an app in a thread only ends its call.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and not isinstance(ex, Exception):
            raise
        log(ERROR, "ClientApp raised an exception", exc_info=ex)
        reason = f"{type(ex)}:<'{ex}'>"
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
        reply = Message(error, reply_to=message)
    return reply


async def _handshake_frame(call: grpc.aio.StreamStreamCall) -> memoryview:
    """Return the next frame of a handshake."""
    chunk = await call.read()
    if chunk is grpc.aio.EOF:
        raise ConnectionError("the server hung up in the middle of the handshake")
    frame = Assembler(MAX_HANDSHAKE).feed(chunk)
    if frame is None:
        raise WireError("the server sent too much in the handshake")
    return frame
