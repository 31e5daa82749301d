"""The server that authenticates nodes and moves frames to their sessions."""

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from functools import partial
from logging import DEBUG, INFO
from typing import Any, Final, NoReturn

import grpc
from flwr.supercore import log

from flower_vfl.errors import ConfigError

from . import settings
from .admission import ConnectionMonitor, RefusalLog, WaitingStreams
from .authentication import Authentication, RefusedError, TokenRegistry, session_number
from .event_loop import SendQueue, event_loop, read_frame, read_frames
from .executor import SocketReader
from .local_socket import Listener, LocalConnection, LocalStream
from .pending_requests import Connection, PendingRequests, ServerSession
from .settings import Endpoint, Limits, join_address
from .wire import END, REPLY, WireError, read_frame_head, split_frame

_GRACE: Final = 2.0  # seconds for streams to end
_POLL: Final = 1.0  # seconds between two polls for connections without a stream
_READ: Final = 0.02  # seconds between two polls of sockets that no thread reads
_TOO_LONG: Final = "took too long to authenticate itself"
_TOO_MANY: Final = "made room for a newer one of too many unauthenticated connections"
_LEFT: Final = "left, or sent too much at once, before it was authenticated"


class StreamServer(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Serves one stream for each node and holds the sessions by node id."""

    def __init__(
        self, endpoint: Endpoint, limits: Limits, requests: PendingRequests, share: bool
    ) -> None:
        self.condition = requests.condition
        self.condition.reader = self._reader = SocketReader()
        requests.end_session = self.end
        self.sessions: dict[int, ServerSession] = {}
        self._by_number: dict[int, ServerSession] = {}
        self._carriers: dict[int, Connection] = {}  # by the process of the nodes
        self._tokens = TokenRegistry()
        self._waiting = WaitingStreams()
        self._refusals = RefusalLog()
        self._credentials = endpoint.credentials
        self._limits = limits
        self._on_reply = requests.receive
        self._shared = share  # by the nodes of a process: a connection for requests
        self._server: grpc.aio.Server | None = None
        host, port = settings.split_address(endpoint.address)
        self._socket = _reserve_port(host, port)  # until gRPC has it
        self.port: int = self._socket.getsockname()[1]
        self._address = join_address(host, self.port)
        self._monitor = ConnectionMonitor(self.port, limits.authenticate)
        self._listener = Listener.create() if endpoint.is_local else None
        self.path = "" if self._listener is None else self._listener.path
        self._background: list[asyncio.Future[None]] = []
        self._local: set[asyncio.Future[None]] = set()  # connections

    def start(self) -> None:
        """Start the gRPC server on the reserved port if it does not run yet."""
        if self._server is None:
            self._on_loop(self._start())
            self._socket.close()

    async def _start(self) -> None:
        timeout = int(self._limits.authenticate * 1000)
        options = [
            *settings.transport_options(self._limits),
            ("grpc.server_handshake_timeout_ms", timeout),
            ("grpc.max_connection_idle_ms", timeout),
            ("grpc.max_concurrent_streams", 1),  # of one connection
        ]
        server = grpc.aio.server(handlers=[self], options=options)
        if self._credentials is None:
            port = server.add_insecure_port(self._address)
        else:
            port = server.add_secure_port(self._address, self._credentials)
        if port != self.port:
            raise ConfigError(f"cannot listen on {self._address}")
        await server.start()
        work = [self._monitor_connections(), self._read_sockets()]
        if self._listener is not None:
            work.append(self._listener.accept(self._on_local_stream))
        self._background = [asyncio.ensure_future(each) for each in work]
        self._server = server

    async def _monitor_connections(self) -> None:
        """Log connections that gRPC closes without a report."""
        while True:
            await asyncio.sleep(min(_POLL, self._limits.authenticate / 2))
            for peer in self._monitor.poll():
                self._refusals.add(peer, "connected and never opened a stream")
            self._refusals.flush()

    async def _read_sockets(self) -> None:
        """Read sockets now and then, as threads do that wait for replies."""
        while True:
            await asyncio.sleep(_READ)
            with self.condition:
                self.condition.wait(0.0)

    def stop(self, reason: str) -> None:
        """End every session and stop listening."""
        with self.condition:
            for session in self.sessions.values():
                self.end(session, reason)
        if self._server is not None:
            self._on_loop(self._stop(self._server))
            self._server = None
        if self._listener is not None:
            self._listener.close()
        self._socket.close()

    async def _stop(self, server: grpc.aio.Server) -> None:
        await server.stop(grace=_GRACE)
        if self._local:
            await asyncio.wait(self._local, timeout=_GRACE)
        for task in [*self._background, *self._local]:
            task.cancel()

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, event_loop()).result(60)

    def create_session(self, run_id: int, node_id: int) -> bytes:
        """Replace the session of a node by a new one and return its token."""
        with self.condition:
            old = self.sessions.get(node_id)
            if old is not None:
                self.end(old, "replaced by a new session")
            token = self._tokens.issue(run_id, node_id)
            session = ServerSession(run_id, node_id, session_number(token))
            self.sessions[node_id] = self._by_number[session.number] = session
        return token

    def is_open(self, node_id: int) -> bool:
        """Return whether a node has a session that has not ended."""
        session = self.sessions.get(node_id)
        return session is not None and session.end_reason is None

    def end(self, session: ServerSession, reason: str) -> None:
        """End a session for good; lock held."""
        if session.end_reason is None:
            session.end_reason = reason
            self._tokens.revoke(session.run_id, session.node_id)
            self._by_number.pop(session.number, None)
            if session.connection is not None:
                session.connection.put(END, reason.encode())
                session.connection.close()
            self.condition.notify_all()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call (called by gRPC)."""
        known = handler_call_details.method == settings.METHOD
        handler = self._serve_stream if known else self._refuse_method
        return grpc.stream_stream_rpc_method_handler(handler)

    async def _refuse_method(self, _: object, context: Any) -> None:
        self._monitor.ignore(context.peer())
        problem = RefusedError("called an unknown method")
        await self._refuse(context, context.peer(), problem)

    async def _serve_stream(self, _: object, context: Any) -> None:
        connection = SendQueue(context.peer())
        session = await self._authenticate(context, connection)
        handle = partial(self._on_frame, session, connection)
        receive = read_frames(context, self._limits.max_frame, handle)
        reader = asyncio.ensure_future(self._read(receive, session, connection))
        try:
            await connection.drain(context.write)
        finally:
            reader.cancel()
            self._disconnect(session, connection)

    def _on_local_stream(self, stream: LocalStream) -> None:
        task = asyncio.ensure_future(self._serve_local(stream))
        self._local.add(task)
        task.add_done_callback(self._local.discard)

    async def _serve_local(self, stream: LocalStream) -> None:
        connection = LocalConnection(stream, self._limits.max_frame)
        try:
            session = await self._authenticate(stream, connection)
            handle = partial(self._on_frame, session, connection)
            receive = asyncio.wrap_future(self._reader.attach(connection, handle))
            connection.start()
            await self._read(receive, session, connection)
            self._disconnect(session, connection)
        except OSError as ex:  # refused, which is logged, or gone
            log(DEBUG, "Session: %s: %s", connection.peer, ex)
        finally:
            connection.dispose()

    async def _authenticate(
        self, context: Any, connection: Connection
    ) -> ServerSession:
        """Connect a peer to its session, or log why it is refused and raise."""
        peer = connection.peer
        self._monitor.ignore(peer)
        with self.condition:
            expected = sum(session.is_expected for session in self.sessions.values())
        timeout, kept = asyncio.timeout(self._limits.authenticate), True
        try:
            async with timeout:
                self._waiting.add(timeout, peer, self._limits.pending + expected)
                try:
                    node, proof = await self._exchange(context, timeout)
                finally:  # a timeout that has ended cannot be moved any more
                    kept = self._waiting.remove(timeout)
            token = self._tokens.check(node, proof)
            connection.put(node.proof(token, b"server"))
            return self._connect(node.node_id, connection)
        except TimeoutError:
            text = _TOO_LONG if kept else _TOO_MANY
            await self._refuse(context, peer, RefusedError(text, retry=True))
        except (RefusedError, WireError) as problem:
            await self._refuse(context, peer, problem)
        except asyncio.CancelledError:
            self._refusals.add(peer, _LEFT)
            raise
        except Exception as ex:  # gRPC raises several types when a stream breaks
            left = RefusedError(f"{_LEFT} ({ex})", retry=True)
            await self._refuse(context, peer, left)

    async def _exchange(
        self, context: Any, timeout: asyncio.Timeout
    ) -> tuple[Authentication, memoryview]:
        """Exchange nonces with a peer, and return what it says and its proof."""
        node = Authentication.from_hello(await read_frame(context))
        named = self.sessions.get(node.node_id)
        if named is not None and named.is_expected:
            self._waiting.name(timeout, node.node_id)
        node.server_nonce = secrets.token_bytes(32)
        await context.write(split_frame([node.server_nonce])[0])
        return node, await read_frame(context)

    async def _refuse(self, context: Any, peer: str, problem: Exception) -> NoReturn:
        """Log why a connection is refused and abort the call."""
        self._refusals.add(peer, problem)
        retry = isinstance(problem, RefusedError) and problem.retry
        code = grpc.StatusCode.UNAVAILABLE if retry else grpc.StatusCode.UNAUTHENTICATED
        # The peer learns only whether it may try again.
        await context.abort(code, "refused")
        raise AssertionError("abort raises")

    def _connect(self, node_id: int, connection: Connection) -> ServerSession:
        with self.condition:
            session = self.sessions.get(node_id)
            if session is None or session.end_reason is not None:
                raise RefusedError(f"the session of node {node_id} has ended")
            if session.connection is not None:
                other = session.connection.peer
                text = f"node {node_id} is already connected from {other}"
                raise RefusedError(text, retry=True)
            session.connect(connection)
            self.condition.notify_all()
        return session

    def _disconnect(self, session: ServerSession, connection: Connection) -> None:
        with self.condition:
            if session.connection is not connection:
                return
            session.connection = session.carrier = None
            session.disconnected_at = time.monotonic()
            if self._carriers.get(connection.process) is connection:
                del self._carriers[connection.process]
                for each in self.sessions.values():  # uses its own from now on
                    if each.carrier is connection and each.connection is not None:
                        each.connect(each.connection)
            self.condition.notify_all()
            ended = session.end_reason is not None
        if not ended:
            text = "Session: node %s (%s) lost its connection, %s s to reconnect"
            log(INFO, text, session.node_id, connection.peer, self._limits.silence)

    async def _read(
        self, receive: Awaitable[Any], session: ServerSession, connection: Connection
    ) -> None:
        """Receive frames until the stream ends."""
        try:
            await receive
        except WireError as problem:
            peer = f"{connection.peer} (node {session.node_id})"
            self._refusals.add(peer, problem)
            with self.condition:
                self.end(session, str(problem))
        except Exception as ex:  # gRPC raises several types when a stream breaks
            log(DEBUG, "Session: node %s: %s", session.node_id, ex)
        finally:
            connection.close()

    def _share(self, session: ServerSession, connection: Connection) -> None:
        """Let one connection carry the requests to all nodes of a process."""
        if not (self._shared and connection.process):
            return
        with self.condition:
            # An unanswered request might be overtaken on another connection.
            if session.connection is connection and not session.unanswered:
                known = self._carriers.setdefault(connection.process, connection)
                session.carrier = known

    def _on_frame(
        self, session: ServerSession, connection: Connection, frame: memoryview
    ) -> None:
        kind = bytes(frame[:1])
        if kind == REPLY:
            head, payload = read_frame_head(frame)
            if head.session != session.number:
                found = self._by_number.get(head.session)
                other = None if found is None else found.connection
                if isinstance(connection, LocalConnection) and other is None:
                    return  # it is repeated when the node has reconnected
                # Only nodes of one process answer for each other.
                process = 0 if other is None else other.process
                if found is None or process == 0 or process != connection.process:
                    raise WireError("a reply of another session")
                session = found
            self._on_reply(session, head.sequence, payload)
            if session.connection is connection and not session.unanswered:
                self._share(session, connection)
        elif kind == END:
            reason = bytes(frame[1:200]).decode(errors="replace")
            with self.condition:
                self.end(session, f"the node ended it: {reason}")
        else:
            raise WireError("malformed frame")


def _reserve_port(host: str, port: int) -> socket.socket:
    """Bind a port without listening on it, so that gRPC can start later."""
    # gRPC would share a port that another process of the same user serves. The first
    # bind, which is exclusive, prevents that.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
        reserved = socket.socket(family)
        with suppress(AttributeError, OSError):  # not available everywhere
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, port))
    except OSError as ex:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {ex}") from ex
    return reserved
