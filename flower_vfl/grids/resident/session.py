"""The node's side of sessions: connect, authenticate, answer, reconnect."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import fields
from functools import partial
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any, Final

import grpc
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from flower_vfl.errors import ConfigError
from flower_vfl.protocol.lazy_array import Buffer
from flower_vfl.protocol.residence import PLAINTEXT, RESIDENT

from . import settings, wire
from .authentication import Authentication, RefusedError, session_number
from .event_loop import SendQueue, event_loop, flush, read_frame, read_frames
from .executor import Executor
from .local_socket import LocalConnection, LocalStream
from .pending_requests import Connection
from .settings import SessionOffer, is_loopback
from .wire import WireError

_FIRST_DELAY, _LAST_DELAY = 0.05, 1.0  # seconds before the node connects again
_FINAL: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


class ResidentContext(Context):
    """The context of a node that stays in memory; its copies are ordinary contexts."""

    # Flower's own object never gets the mark: Ray pickles it with the reply that opens
    # a session, and a blocking session hands it back to Flower.

    def __init__(self, context: Context, encrypted: bool = True) -> None:
        self.__dict__.update(context.__dict__)
        self.__dict__[RESIDENT] = encrypted or PLAINTEXT

    def __reduce__(self) -> tuple[type[Context], tuple[Any, ...]]:
        """Leave the mark behind in a deep copy and in another process."""
        return Context, tuple(getattr(self, field.name) for field in fields(Context))


class NodeSession:
    """The session of one node with one server."""

    def __init__(
        self, app: ClientApp, context: Context, offer: SessionOffer, executor: Executor
    ) -> None:
        host, _ = settings.split_address(offer.address)
        if context.node_config.get("require-tls") and not offer.certificate:
            wanted = "this node wants one (require-tls): give the ResidentGrid one"
            text = f"the grid at {offer.address} has no certificate, and {wanted}"
            raise ConfigError(text)
        if not offer.certificate and not (offer.insecure or is_loopback(host)):
            text = f"refusing plaintext to {offer.address}. {settings.REMEDY}"
            raise ConfigError(text)
        self.context = ResidentContext(context, bool(offer.certificate))
        self.handled = 0
        self._app = app
        self._offer = offer
        self._executor = executor
        self._number = session_number(offer.token)
        self._local = is_loopback(host)
        self._end_reason: str | None = None
        self._queue: Connection | None = None  # of the current connection
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
            self._executor.sessions.pop(self._number, None)
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
        path = "" if self._offer.certificate else self._offer.path
        try:
            stream = await LocalStream.connect(path) if path else None
            if stream is None:
                return await self._serve_grpc()
            return await self._serve_local(stream)
        except grpc.RpcError as ex:
            if ex.code() in _FINAL:
                return f"refused by {self._offer.address}"
            self._log_loss(ex.code())
        except OSError as ex:
            self._log_loss(repr(ex))
        except RefusedError as ex:
            if not ex.retry:
                return str(ex)
            self._log_loss(ex)
        except WireError as ex:
            return str(ex)
        finally:
            self._queue = None
        return None

    async def _serve_grpc(self) -> str | None:
        queue = SendQueue()
        writer: asyncio.Future[None] | None = None
        async with self._channel() as channel:
            call = channel.stream_stream(settings.METHOD)()
            try:
                await self._authenticate(call, queue)
                writer = asyncio.ensure_future(_write(call, queue))
                limit = self._offer.limits.max_frame
                return await read_frames(call, limit, self._on_frame)
            finally:
                if writer is not None:
                    writer.cancel()
                call.cancel()

    async def _serve_local(self, stream: LocalStream) -> str | None:
        connection = LocalConnection(stream, self._offer.limits.max_frame)
        try:
            await self._authenticate(stream, connection)
            connection.start()
            # Frames are answered in the thread that reads them.
            handle = partial(self._on_frame, local=connection)
            return await asyncio.wrap_future(self._executor.attach(connection, handle))
        finally:
            connection.dispose()

    def _log_loss(self, problem: object) -> None:
        # While the node tries to connect, failed attempts are expected.
        level = DEBUG if self._queue is None else INFO
        log(level, "Session of node %s: %s", self.context.node_id, problem)

    def _channel(self) -> grpc.aio.Channel:
        options = [
            *settings.transport_options(self._offer.limits),
            # A new connection each time, without the back-off of another channel.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0 if self._local else 1),
        ]
        address = self._offer.address
        if not self._offer.certificate:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(self._offer.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    async def _authenticate(self, stream: Any, queue: Connection) -> None:
        """Authenticate both ends, and then use the connection for replies."""
        token = self._offer.token
        node = Authentication(self.context.run_id, self.context.node_id)
        async with asyncio.timeout(self._offer.limits.authenticate):
            await stream.write(wire.split_frame([node.hello()])[0])
            node.server_nonce = bytes(await read_frame(stream))
            await stream.write(wire.split_frame([node.proof(token, b"node")])[0])
            node.check_server(token, await read_frame(stream))
        self._connections += 1
        self._active_at = time.monotonic()
        self._queue = queue
        self._executor.sessions[self._number] = self

    def _on_frame(
        self, frame: memoryview, *, local: LocalConnection | None = None
    ) -> str | None:
        """Answer a request, or queue it; return the reason if the session ends."""
        kind = bytes(frame[:1])
        if kind == wire.REQUEST:
            # One Unix socket has the requests to all nodes of this process. Those of a
            # session that has ended need no reply.
            head, _ = wire.read_frame_head(frame)
            session = self._executor.sessions.get(head.session)
            if session is not None:
                session.accept(frame, local)
            return None
        if kind == wire.END:
            return self._end_reason or bytes(frame[1:]).decode(errors="replace")
        raise WireError("the server sent a frame of an unknown kind")

    def accept(self, frame: memoryview, local: LocalConnection | None) -> None:
        """Answer a request that came over a Unix socket, or queue it."""
        self._received += 1
        if local is None:
            self._executor.submit(partial(self.answer, frame))
        else:
            self.answer(frame, local)

    async def _check_idle(self) -> None:
        """End the session if it is connected and idle for too long."""
        idle = self._offer.limits.idle
        while self._end_reason is None:
            left = self._active_at + idle - time.monotonic()
            working = self._received > self._answered or self._executor.busy
            if working or self._queue is None:
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

    def answer(self, frame: memoryview, local: LocalConnection | None = None) -> None:
        """Answer a request, or end the session; the others of this process go on."""
        try:
            self._answer(*wire.read_frame_head(frame), local)
        except Exception as ex:
            self.end(f"cannot answer: {type(ex).__name__}: {ex}")
        finally:
            self._answered += 1
            self._active_at = time.monotonic()

    def _answer(
        self, head: wire.FrameHead, payload: memoryview, local: LocalConnection | None
    ) -> None:
        """Send the reply to a request, the same again if it was answered before."""
        sequence = head.sequence
        if head.oldest > self._oldest:
            self._oldest = head.oldest
            for old in [number for number in self._replies if number < head.oldest]:
                del self._replies[old]
        if sequence < self._oldest:
            return
        reply = self._replies.get(sequence)
        if reply is None:
            reply = self._replies[sequence] = self._handle(payload)
            self.handled += 1
        queue = local or self._queue
        # Without a connection the server asks again later.
        if queue is not None:
            queue.put(wire.frame_head(wire.REPLY, self._number, sequence), *reply)
            if queue is not local:  # the executor sends replies when it has read all
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


_lock: Final = threading.Lock()
_shared: Final[list[Executor]] = []  # of all detached sessions in this process


def _shared_executor() -> Executor:
    """Return the executor of this process, in a thread that starts on first use."""
    with _lock:
        if not _shared:
            _shared.append(Executor())
            name = "resident-executor"
            threading.Thread(target=_shared[0].run, name=name, daemon=True).start()
        return _shared[0]


class _ResidentApp(ClientApp):
    """Opens sessions and passes every other message to the wrapped app."""

    def __init__(self, app: ClientApp) -> None:
        super().__init__()
        self._app = app
        # Functions that are registered with this app go to the wrapped one.
        registrars = ("train", "evaluate", "query", "lifespan")
        vars(self).update({name: getattr(app, name) for name in registrars})

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != settings.OPEN_TYPE:
            return self._app(message, context)
        record = message.content.config_records[settings.OPEN_RECORD]
        offer = SessionOffer.from_record(record)
        executor = _shared_executor() if offer.detached else Executor()
        session = NodeSession(self._app, context, offer, executor)
        result = asyncio.run_coroutine_threadsafe(session.run(), event_loop())
        report = ConfigRecord({"state": "detached"})  # it goes on in the background
        if not offer.detached:  # the process ends with this reply
            result.add_done_callback(lambda _: executor.submit(None))
            executor.run()
            context.state = session.context.state
            report["state"], report["reason"] = "ended", result.result()
            report["messages"] = session.handled
        return Message(RecordDict({settings.OPEN_RECORD: report}), reply_to=message)


def resident(client_app: ClientApp) -> ClientApp:
    """Return a ClientApp that can stay in memory for the length of a run.

    The wrapped app gets the same messages in the same order, one at a time, with the
    `Context` of its node, which the session keeps in memory.

    Parameters
    ----------
    client_app : ClientApp
        Any ClientApp. Functions may be registered with it or with the returned app.

    Examples
    --------
    >>> from flwr.app import Message
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, ResidentGrid
    >>> app = resident(ClientApp())
    >>> @app.query()
    ... def echo(message, context):
    ...     return Message(message.content, reply_to=message)
    >>> with ResidentGrid(InProcessGrid(app, nodes=2)) as grid:
    ...     grid.open()
    [1, 2]
    """
    return _ResidentApp(client_app)
