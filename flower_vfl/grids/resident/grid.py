"""A Flower grid whose messages travel over streams that stay open."""

import atexit
import os
import threading
import time
from collections.abc import Iterable
from functools import partial
from logging import INFO, WARNING
from typing import Final, Literal

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.errors import check_name
from flower_vfl.grids.wrapped import WrappedGrid

from . import settings
from .pending_requests import PendingRequests, ServerSession
from .settings import Endpoint, Limits, Pem, SessionError, SessionOffer
from .stream_server import StreamServer

_OPEN_TTL: Final = 30 * 24 * 3600.0
_FAST_POLL, _SLOW_POLL = 0.05, 1.0  # seconds between two polls for plain replies
_NO_SESSION: Final = "its app answered the offer of a session itself"
_OFFLINE: Final = "its SuperNode is offline (a killed one may rejoin after a minute)"


class ResidentGrid(WrappedGrid):
    """Carry Flower messages over one stream per node.

    Messages and replies are the same as on the wrapped grid. A node joins with the
    first message to it, or with `open`: one ordinary Flower message gives it an
    address, a certificate and a secret token. The node connects over gRPC, or over a
    Unix socket if the grid listens on loopback without a certificate and nothing else
    is advertised. From then on the node and its `Context` stay in memory.

    A node that loses its connection has ``limits.silence`` seconds to reconnect. The
    grid then repeats the unanswered messages. After that time, messages to the node
    become error replies (`ErrorCode.NODE_UNAVAILABLE`) until `open` is called for it
    or, with `reopen`, until the next message to it.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    address : str (default: "127.0.0.1:0")
        ``host:port`` to listen on; port 0 takes a free one.
    advertise : str | None (default: None)
        ``host`` or ``host:port`` that nodes connect to, if it is not `address`.
    certificate, private_key : bytes | str | Path | None (default: None)
        PEM certificate chain of this server and its key, or the files that hold them.
    root_certificate : bytes | str | Path | None (default: None)
        PEM certificate that nodes trust; `certificate` if not given.
    insecure : bool (default: False)
        Allow plaintext on addresses that are not loopback.
    wire_dtype : "float16" | "bfloat16" | None (default: None)
        Send float32 arrays in half precision. They arrive as float32. An array with a
        finite value outside the range of the type is sent unchanged.
    detached : bool | None (default: None)
        Whether the process of a node outlives a message, as a Ray actor does. None
        means true on Flower's in-memory grid (simulation) and on `InProcessGrid`.
    on_missing : "error" | "plain" (default: "error")
        Whether a message to a node that did not join becomes an error reply or an
        ordinary message. One to a node that was lost is always an error.
    reopen : bool (default: False)
        Whether the message after that error opens a new session; for apps that detect
        that a node has lost its state.
    open_timeout, close_timeout : float (default: 120.0, 10.0)
        Seconds that a node has to join (a SuperNode takes about a minute to notice that
        its client process was killed), and that `close` waits for client processes.
    limits : Limits | None (default: None)
        Limits of every session; ``Limits()`` if not given.

    Examples
    --------
    >>> from flwr.app import ConfigRecord, Message, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, ResidentGrid, resident
    >>> app = resident(ClientApp())
    >>> @app.query()
    ... def echo(message, context):
    ...     return Message(message.content, reply_to=message)
    >>> with ResidentGrid(InProcessGrid(app, nodes=2)) as grid:
    ...     messages = [Message(RecordDict(), node, "query") for node in (1, 2)]
    ...     replies = grid.send_and_receive(messages)
    >>> sorted(reply.metadata.src_node_id for reply in replies)
    [1, 2]
    """

    def __init__(
        self,
        grid: Grid,
        *,
        address: str = "127.0.0.1:0",
        advertise: str | None = None,
        certificate: Pem | None = None,
        private_key: Pem | None = None,
        root_certificate: Pem | None = None,
        insecure: bool = False,
        wire_dtype: Literal["float16", "bfloat16"] | None = None,
        detached: bool | None = None,
        on_missing: Literal["error", "plain"] = "error",
        reopen: bool = False,
        open_timeout: float = 120.0,
        close_timeout: float = 10.0,
        limits: Limits | None = None,
    ) -> None:
        if wire_dtype is not None:
            check_name("wire_dtype", wire_dtype, settings.WIRE_DTYPES)
        check_name("on_missing", on_missing, ("error", "plain"))
        super().__init__(grid)
        pems = certificate, private_key, root_certificate
        self._endpoint = Endpoint(address, advertise, insecure, *pems)
        self._wire_dtype = wire_dtype
        # By name: the class is not public, and importing it would load the SuperLink.
        kinds = {kind.__name__ for kind in type(grid).__mro__}
        simulation = bool(kinds & {"InMemoryGrid", "InProcessGrid"})
        self._detached = simulation if detached is None else detached
        self._on_missing = on_missing
        self.ordered = on_missing == "error"  # plain messages may overtake others
        self._reopen = reopen
        self._open_timeout = open_timeout
        self._close_timeout = close_timeout
        self._limits = limits or Limits()
        self._server: StreamServer | None = None
        self._requests = PendingRequests(self._limits, wire_dtype)
        self._lock = threading.RLock()
        self._offer_ids: dict[int, str] = {}  # of unanswered offers, by node
        self._missing: dict[int, str] = {}  # why nodes did not join
        self._plain_ids: set[str] = set()

    def open(
        self, node_ids: Iterable[int] | None = None, *, timeout: float | None = None
    ) -> list[int]:
        """Open a session with each node that has none or was lost; return all ids."""
        wanted = list(self.get_node_ids() if node_ids is None else node_ids)
        timeout = self._open_timeout if timeout is None else timeout
        with self._lock:
            server = self._get_server()
            with server.condition:
                closed = [n for n in wanted if not server.is_open(n)]
            self._open_sessions(server, closed, timeout)
            missing = {n: self._missing[n] for n in wanted if n in self._missing}
        if missing:
            raise SessionError(missing)
        return wanted

    def close(self) -> None:
        """End every session; the grid may be opened again afterwards."""
        with self._lock:
            server, self._server = self._server, None
            if server is None:
                return
            atexit.unregister(self.close)
            server.stop("the run ended")
            with self._requests.condition:
                self._requests.expire()
            self._discard_replies()

    def _discard_replies(self) -> None:
        """Take the replies to all offers from the wrapped grid, and forget them."""
        waiting = set(self._offer_ids.values())
        self._offer_ids.clear()
        end = time.monotonic() + self._close_timeout
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
            if waiting:
                time.sleep(_FAST_POLL if self._detached else 4 * _FAST_POLL)

    def _get_server(self) -> StreamServer:
        if self._server is None:
            self._server = StreamServer(
                self._endpoint, self._limits, self._requests, self._detached
            )
            atexit.register(self.close)
        return self._server

    def _send_offers(
        self, server: StreamServer, node_ids: list[int], timeout: float
    ) -> None:
        """Send each node the Flower message that opens its session."""
        messages = []
        for node_id in node_ids:
            offer = SessionOffer(
                address=self._endpoint.advertised(server.port),
                certificate=self._endpoint.root,
                token=server.create_session(self.run.run_id, node_id),
                insecure=self._endpoint.insecure,
                detached=self._detached,
                wire_dtype=self._wire_dtype or "",
                connect_timeout=timeout,
                limits=self._limits,
                path=server.path,
            )
            content = RecordDict({settings.OPEN_RECORD: offer.to_record()})
            message = Message(content, node_id, settings.OPEN_TYPE, ttl=_OPEN_TTL)
            messages.append(message)
        ids = self._grid.push_messages(messages)
        # Flower returns None, or too few ids, for messages that it did not accept.
        self._offer_ids.update({n: i for n, i in zip(node_ids, ids, strict=False) if i})

    def _open_sessions(
        self, server: StreamServer, node_ids: list[int], timeout: float
    ) -> None:
        """Offer sessions and wait until each node is connected or has failed."""
        if not node_ids:
            return
        # Ray forks while it starts, and a gRPC server in the same process does not
        # survive a fork. In a simulation the server waits for the first reply.
        if not self._detached:
            server.start()
        # The first of Ray's actors to start would get all nodes that wait then. With
        # few nodes there is an actor for each; otherwise all actors start first.
        first, cores = len(node_ids), os.cpu_count() or 1
        if self._detached and first > 2 * cores:
            first = cores
        failed: dict[int, str] = {}
        try:
            for wave in filter(None, (node_ids[:first], node_ids[first:])):
                self._send_offers(server, wave, timeout)
                end = time.monotonic() + timeout
                failed |= self._await_nodes(server, set(wave), end)
        except BaseException:  # by the wrapped grid, or an interrupt
            self._withdraw(server, node_ids)
            raise
        with server.condition:
            for node_id in node_ids:
                self._missing.pop(node_id, None)
            for node_id, reason in failed.items():
                self._offer_ids.pop(node_id, None)
                server.end(server.sessions.pop(node_id), reason)
                log(WARNING, "Session: node %s did not join: %s", node_id, reason)
            self._missing.update(failed)
        # Ten times a second, a simulation compares the messages that it still has with
        # every node: 0.4 s of work with 256 nodes and a message for each.
        if self._detached:
            self._discard_replies()
        log(INFO, "Session: %s nodes joined", len(node_ids) - len(failed))

    def _withdraw(self, server: StreamServer, node_ids: list[int]) -> None:
        """Forget sessions that no node has joined, so that they are offered again."""
        with server.condition:
            for node_id in node_ids:
                session = server.sessions.get(node_id)
                if session is None or session.disconnected_at is not None:
                    continue
                if session.is_expected:
                    self._offer_ids.pop(node_id, None)
                    server.end(server.sessions.pop(node_id), "it was not opened")

    def _await_nodes(
        self, server: StreamServer, waiting: set[int], deadline: float
    ) -> dict[int, str]:
        """Wait for connections; return the reasons of the nodes without one."""
        failed: dict[int, str] = {}
        reasons = dict.fromkeys(waiting, "no answer")
        interval = _FAST_POLL if self._detached else _SLOW_POLL
        while True:
            with server.condition:
                waiting = {n for n in waiting if server.sessions[n].connection is None}
                left = deadline - time.monotonic()
                if not waiting or left <= 0:
                    break
                joined = partial(_all_joined, [server.sessions[n] for n in waiting])
                server.condition.wait_for(joined, min(left, interval))
            nodes = self._offer_ids.keys() if self._detached else waiting
            offers = {i: n for n, i in self._offer_ids.items() if n in nodes}
            offline: list[int] = []
            for reply in self._grid.pull_messages(list(offers)) if offers else ():
                # The SuperLink answers for an offline node, so its source is no help.
                node_id = offers[reply.metadata.reply_to_message_id]
                self._offer_ids.pop(node_id, None)
                server.start()
                if node_id not in waiting:  # it has joined
                    continue
                if not reply.has_error():
                    reasons[node_id] = "did not connect in time"
                    report = reply.content.config_records.get(settings.OPEN_RECORD)
                    report = report or ConfigRecord({"reason": _NO_SESSION})
                    if report.get("state") != "detached":
                        failed[node_id] = str(report.get("reason"))
                elif reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                    reasons[node_id] = _OFFLINE
                    offline.append(node_id)  # it may come back before the deadline
                else:
                    failed[node_id] = reply.error.reason or f"error {reply.error.code}"
            waiting -= set(failed)
            if offline:
                self._send_offers(server, offline, left)
        return {**failed, **{n: reasons[n] for n in waiting}}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids, in order."""
        messages = list(messages)
        plain, resident = self._split(messages)
        self._requests.send(resident, self._find)
        if plain:
            self._plain_ids.update(self._grid.push_messages(plain))
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, each once, in order of arrival."""
        wanted = set(message_ids)
        replies = self._requests.collect(wanted)
        plain = wanted & self._plain_ids
        if plain:
            others = list(self._grid.pull_messages(plain))
            self._plain_ids -= {r.metadata.reply_to_message_id for r in others}
            replies.extend(others)
        return replies

    def receive(self, message_ids: Iterable[str], timeout: float) -> Iterable[Message]:
        """Return the replies that have arrived; wait for some if there are none.

        Replies to messages that were pushed together count once all have arrived.
        """
        wanted = set(message_ids)
        self._requests.wait(wanted, time.monotonic() + timeout, first=True)
        return self.pull_messages(wanted)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies, in order of arrival."""
        deadline = None if timeout is None else time.monotonic() + timeout
        plain, resident = self._split(list(messages))
        group = self._requests.send(resident, self._find)
        others = self._grid.send_and_receive(plain, timeout=timeout) if plain else ()
        self._requests.wait(group, deadline)
        ids = {message.metadata.message_id for message in resident}
        return [*self._requests.collect(ids), *others]

    def _split(self, messages: list[Message]) -> tuple[list[Message], list[Message]]:
        """Open missing sessions; split messages by wrapped grid and sessions."""
        node_ids = {message.metadata.dst_node_id for message in messages}
        with self._lock:
            server = self._get_server()
            known = server.sessions.keys() | self._missing.keys()
            if self._reopen:
                known = {n for n in known if server.is_open(n)}
            self._open_sessions(server, sorted(node_ids - known), self._open_timeout)
            plain = set(self._missing) if self._on_missing == "plain" else set()
        sent = [m for m in messages if m.metadata.dst_node_id not in plain]
        return [m for m in messages if m.metadata.dst_node_id in plain], sent

    def _find(self, node_id: int) -> ServerSession | str:
        """Return the session of a node, or why it has none."""
        session = None if self._server is None else self._server.sessions.get(node_id)
        return session or self._missing.get(node_id, "the grid is closed")


def _all_joined(sessions: list[ServerSession]) -> bool:
    return all(session.connection is not None for session in sessions)
