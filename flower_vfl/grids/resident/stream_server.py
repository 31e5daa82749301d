"""The server's end of every stream: one gRPC service that admits nodes."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from logging import DEBUG, INFO, WARNING
from typing import Any, Final, NoReturn, TypeVar

import grpc
from flwr.supercore import log

from flower_vfl.errors import ConfigError

from .admission import MAX_HANDSHAKE, NONCE_BYTES, Handshake, Refusal, TokenRegistry
from .links import BYE, REPLY, Connection, Link, read_reply
from .loop import the_loop
from .settings import (
    METHOD,
    SERVICE,
    Limits,
    join_address,
    split_address,
    transport_options,
)
from .strangers import Strangers
from .wire import Assembler, WireError, chunks

T = TypeVar("T")

_GRACE: Final = 2.0
_REFUSED: Final = "Session refused: peer %s: %s"
_SPOKE_NOT: Final = "connected and never began a session"
_LOOK: Final = 1.0  # seconds between two looks for connections without a stream
_LEFT: Final = "left, or sent too much at once, before it was admitted"


class StreamServer(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Admits nodes and moves frames between their streams and their links."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ServerCredentials | None,
        limits: Limits,
        news: threading.Condition,
        answered: Callable[[Link, int, memoryview], None],
    ) -> None:
        self.news = news
        self.links: dict[int, Link] = {}
        self.guests = TokenRegistry(limits.pending)
        self._credentials = credentials
        self._limits = limits
        self._answered = answered
        self._server: grpc.aio.Server | None = None
        host, port = split_address(address)
        self._socket: socket.socket | None = _reserve(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._address = join_address(host, self.port)
        self._strangers = Strangers(self.port, limits.authenticate)
        self._watch: asyncio.Future[None] | None = None

    # --- life -------------------------------------------------------------------

    def start(self) -> None:
        """Start the gRPC server on the reserved port; once is enough."""
        if self._server is None:
            self._server = self._on_loop(self._start())
            self._release()

    async def _start(self) -> grpc.aio.Server:
        wait = int(self._limits.authenticate * 1000)
        server = grpc.aio.server(
            handlers=[self],
            options=[
                *transport_options(self._limits),
                ("grpc.server_handshake_timeout_ms", wait),
                ("grpc.max_connection_idle_ms", wait),
            ],
        )
        if self._credentials is None:
            port = server.add_insecure_port(self._address)
        else:
            port = server.add_secure_port(self._address, self._credentials)
        if port != self.port:
            raise ConfigError(f"cannot listen on {self._address}")
        await server.start()
        self._watch = asyncio.ensure_future(self._watch_strangers())
        return server

    async def _watch_strangers(self) -> None:
        """Log connections that gRPC closes without a word."""
        while True:
            await asyncio.sleep(min(_LOOK, self._limits.authenticate / 2))
            for peer in self._strangers.look():
                log(WARNING, _REFUSED, peer, _SPOKE_NOT)

    def stop(self, reason: str) -> None:
        """Say goodbye to every node and stop listening."""
        with self.news:
            for link in self.links.values():
                self.end(link, reason)
        if self._server is not None:
            self._on_loop(self._stop(self._server))
            self._server = None
        self._release()

    async def _stop(self, server: grpc.aio.Server) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await server.stop(grace=_GRACE)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, the_loop()).result(60)

    def _release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- links ------------------------------------------------------------------

    def invite(self, run_id: int, node_id: int) -> bytes:
        """Return a token for a node; an older session of it ends."""
        with self.news:
            old = self.links.get(node_id)
            if old is not None:
                self.end(old, "replaced by a new session")
            self.links[node_id] = Link(run_id, node_id)
        return self.guests.invite(run_id, node_id)

    def end(self, link: Link, reason: str) -> None:
        """End a link for good; call with the lock held."""
        if link.ended is None:
            link.ended = reason
            self.guests.revoke(link.run_id, link.node_id)
            if link.connection is not None:
                link.connection.add(BYE, reason.encode())
                link.connection.end()
            self.news.notify_all()

    # --- streams ----------------------------------------------------------------

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a call (called by gRPC)."""
        known = handler_call_details.method == f"/{SERVICE}/{METHOD}"
        return grpc.stream_stream_rpc_method_handler(
            self._session if known else self._stranger
        )

    async def _stranger(self, _: object, context: grpc.aio.ServicerContext) -> None:
        self._strangers.know(context.peer())
        problem = Refusal("asked for a method that is not offered")
        await _refuse(context, context.peer(), problem)

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Serve one stream from its first byte to its last."""
        link, connection, token, handshake = await self._welcome(context)
        reader = asyncio.ensure_future(self._read(context, link, connection))
        try:
            await context.write(chunks([handshake.server_proof(token)])[0])
            await connection.drain(context.write)
        finally:
            reader.cancel()
            self._detach(link, connection)

    async def _welcome(
        self, context: grpc.aio.ServicerContext
    ) -> tuple[Link, Connection, bytes, Handshake]:
        """Admit a peer, or write the log line of its refusal and raise."""
        peer = context.peer()  # a dead stream has none
        self._strangers.know(peer)
        with self.news:
            expected = sum(link.is_expected for link in self.links.values())
        try:
            self.guests.enter(expected)
        except Refusal as refusal:
            await _refuse(context, peer, refusal)
        try:
            async with asyncio.timeout(self._limits.authenticate):
                handshake = Handshake.from_hello(await _handshake_frame(context))
                handshake.server_nonce = secrets.token_bytes(NONCE_BYTES)
                await context.write(chunks([handshake.server_nonce])[0])
                proof = await _handshake_frame(context)
            token = self.guests.check(handshake, proof)
            connection = Connection(peer)
            link = self._admit(handshake.node_id, connection)
            return link, connection, token, handshake
        except TimeoutError:
            text = "took too long to prove who it is"
            await _refuse(context, peer, Refusal(text, again=True))
        except (Refusal, WireError) as problem:
            await _refuse(context, peer, problem)
        except asyncio.CancelledError:
            log(WARNING, _REFUSED, peer, _LEFT)
            raise
        except Exception as ex:  # gRPC raises several types when a stream breaks
            await _refuse(context, peer, Refusal(f"{_LEFT} ({ex})", again=True))
        finally:
            self.guests.leave()
        raise AssertionError("a refusal raises")

    def _admit(self, node_id: int, connection: Connection) -> Link:
        with self.news:
            link = self.links.get(node_id)
            if link is None or link.ended is not None:
                raise Refusal(f"the session of node {node_id} is over")
            if link.connection is not None:
                raise Refusal(
                    f"node {node_id} is connected already, from {link.connection.peer}",
                    again=True,
                )
            link.attach(connection)
            self.news.notify_all()
        return link

    def _detach(self, link: Link, connection: Connection) -> None:
        with self.news:
            if link.connection is not connection:
                return
            link.connection, link.lost_at = None, time.monotonic()
            self.news.notify_all()
            ended = link.ended
        if ended is None:
            text = "Session: node %s (%s) lost its connection, %s s to come back"
            log(INFO, text, link.node_id, connection.peer, self._limits.silence)

    async def _read(
        self, context: grpc.aio.ServicerContext, link: Link, connection: Connection
    ) -> None:
        assembler = Assembler(self._limits.max_frame)
        try:
            while (chunk := await context.read()) is not grpc.aio.EOF:
                frame = assembler.feed(chunk)
                if frame is not None:
                    self._take(link, frame)
        except WireError as problem:
            peer = f"{connection.peer} (node {link.node_id})"
            log(WARNING, _REFUSED, peer, problem)
            with self.news:
                self.end(link, str(problem))
        except Exception as ex:  # gRPC raises several types when a stream breaks
            log(DEBUG, "Session: node %s: %s", link.node_id, ex)
        finally:
            connection.end()

    def _take(self, link: Link, frame: memoryview) -> None:
        kind = bytes(frame[:1])
        if kind == REPLY:
            sequence, payload = read_reply(frame)
            self._answered(link, sequence, payload)
        elif kind == BYE:
            reason = bytes(frame[1:200]).decode(errors="replace")
            with self.news:
                self.end(link, f"the node ended it: {reason}")
        else:
            raise WireError("garbage instead of a reply")


async def _handshake_frame(context: grpc.aio.ServicerContext) -> memoryview:
    """Return the next frame of a peer that has yet to prove itself."""
    chunk = await context.read()
    if chunk is grpc.aio.EOF:
        raise Refusal(_LEFT, again=True)
    frame = Assembler(MAX_HANDSHAKE).feed(chunk)
    if frame is None:
        raise WireError("garbage instead of a frame")
    return frame


async def _refuse(
    context: grpc.aio.ServicerContext, peer: str, problem: Exception
) -> NoReturn:
    """Write the one log line of a refusal and abort the call."""
    log(WARNING, _REFUSED, peer, problem)
    again = isinstance(problem, Refusal) and problem.again
    code = grpc.StatusCode.UNAVAILABLE if again else grpc.StatusCode.UNAUTHENTICATED
    # The peer learns no more than whether to try again; abort ends by raising.
    await context.abort(code, "refused")
    raise AssertionError("abort raises")


def _reserve(host: str, port: int) -> socket.socket:
    """Take a port without listening on it, so that gRPC can start later.

    gRPC would share a port that another of the operator's processes serves; hence the
    first, exclusive, bind.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
        reserved = socket.socket(family)
        with suppress(AttributeError, OSError):  # not everywhere
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, port))
    except OSError as ex:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {ex}") from ex
    return reserved
