"""A Flower grid whose messages travel over sessions that stay open."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable
from logging import INFO, WARNING
from types import TracebackType
from typing import Final, Literal

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.errors import unknown_name
from flower_vfl.grids.wrapped import WrappedGrid

from .endpoint import Endpoint, Pem
from .invitation import is_simulation, problem_of
from .links import Link, is_live
from .pending_requests import PendingRequests
from .settings import OPEN_RECORD, OPEN_TYPE, WIRE_DTYPES, Limits, Offer, SessionError
from .stream_server import StreamServer

# What the SuperLink answers in place of a node that is stopped, or silent for long.
_OFFLINE: Final = ErrorCode.NODE_UNAVAILABLE
_OPEN_TTL: Final = 30 * 24 * 3600.0
# Seconds between two looks for ordinary replies, while sessions open and close.
_FAST_POLL: Final = 0.05
_SLOW_POLL: Final = 1.0


class ResidentGrid(WrappedGrid):
    """Carry Flower messages over one gRPC stream per node.

    Messages and replies are the same as on the wrapped grid. A node joins on the first
    message to it, or with `open`: one ordinary Flower message hands it an address, a
    certificate and a secret token, and the node dials out. From then on the node and
    its `Context` stay in memory. An exception of the ClientApp comes back as an error
    reply, as on Flower's own grids.

    A node that loses its connection has ``limits.silence`` seconds to come back; what
    it had not answered is sent again, and a node that had answered already repeats its
    reply without running again. After that its messages come back as error replies
    that name it (`ErrorCode.NODE_UNAVAILABLE`), until `open` is called for it again or,
    with `reopen`, until the next message to it.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    address : str (default: "127.0.0.1:0")
        ``host:port`` to listen on; port 0 takes a free one.
    advertise : str | None (default: None)
        ``host`` or ``host:port`` that the nodes dial, if it is not `address`.
    certificate : bytes | str | Path | None (default: None)
        PEM certificate chain of this server, or the file that holds it.
    private_key : bytes | str | Path | None (default: None)
        PEM key of the certificate, or the file that holds it.
    root_certificate : bytes | str | Path | None (default: None)
        PEM certificate that the nodes trust; `certificate` if not given.
    insecure : bool (default: False)
        Allow plaintext on addresses that are not loopback.
    wire_dtype : "float16" | "bfloat16" | None (default: None)
        Send float32 arrays in half precision. They arrive as float32. An array with a
        finite value that does not fit is sent as it is.
    detached : bool | None (default: None)
        Whether the process of a node outlives a message, as a Ray actor does. By
        default true on Flower's in-memory grid (the simulation), else false.
    on_missing : "error" | "plain" (default: "error")
        What becomes of a message to a node that did not join when it was asked: an
        error reply, or an ordinary message over the wrapped grid. A node that joined
        and was lost always gives an error, because its state is gone.
    reopen : bool (default: False)
        Whether the message after that error invites the node again; for apps that
        notice that a node has lost its state.
    open_timeout : float (default: 120.0)
        Seconds that a node has to join. A SuperNode whose client process was killed
        takes about a minute to notice, and joins again only then.
    farewell : float (default: 10.0)
        Seconds that `close` waits for the nodes' client processes to finish, which
        end with the session where it is not detached.
    limits : Limits | None (default: None)
        Limits of every session; ``Limits()`` if not given.
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
        farewell: float = 10.0,
        limits: Limits | None = None,
    ) -> None:
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise unknown_name("wire_dtype", wire_dtype, WIRE_DTYPES)
        if on_missing not in ("error", "plain"):
            raise unknown_name("on_missing", on_missing, ("error", "plain"))
        super().__init__(grid)
        self._endpoint = Endpoint(
            address, advertise, certificate, private_key, root_certificate, insecure
        )
        self._wire_dtype = wire_dtype
        self._detached = is_simulation(grid) if detached is None else detached
        self._on_missing = on_missing
        self._reopen = reopen
        self._open_timeout = open_timeout
        self._farewell = farewell
        self._limits = limits or Limits()
        self._hub: StreamServer | None = None
        self._mail = PendingRequests(self._limits, wire_dtype, self._give_up)
        self._opening = threading.RLock()
        # Nodes whose client process has yet to answer the invitation.
        self._open_ids: dict[int, str] = {}
        self._missing: dict[int, str] = {}
        self._plain_ids: set[str] = set()

    def open(
        self, node_ids: Iterable[int] | None = None, *, timeout: float | None = None
    ) -> list[int]:
        """Open sessions with nodes that have none; return the ids of those that do.

        Called again for a node that was lost, it starts a new session with it, whose
        state is what the node's app then makes of it.
        """
        wanted = list(self.get_node_ids() if node_ids is None else node_ids)
        with self._opening:
            hub = self._ready_hub()
            with hub.news:
                todo = [n for n in wanted if not is_live(hub.links.get(n))]
            self._join(hub, todo, self._open_timeout if timeout is None else timeout)
            missing = {n: self._missing[n] for n in wanted if n in self._missing}
        if missing:
            raise SessionError(missing)
        return wanted

    def close(self) -> None:
        """End every session; the grid may be opened again afterwards."""
        with self._opening:
            hub, self._hub = self._hub, None
            if hub is None:
                return
            atexit.unregister(self.close)
            hub.stop("the run ended")
            with self._mail.news:
                self._mail.fit()
            waiting = set(self._open_ids.values())
            self._open_ids.clear()
            end = time.monotonic() + self._farewell
            while waiting and time.monotonic() < end:
                for reply in self._grid.pull_messages(waiting):
                    waiting.discard(reply.metadata.reply_to_message_id)
                if waiting:
                    time.sleep(_FAST_POLL if self._detached else 4 * _FAST_POLL)

    def __enter__(self) -> ResidentGrid:
        """Return the grid; sessions open on first use."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the grid."""
        self.close()

    def _ready_hub(self) -> StreamServer:
        if self._hub is None:
            self._hub = StreamServer(
                self._endpoint.address,
                self._endpoint.credentials,
                self._limits,
                self._mail.news,
                self._mail.answered,
            )
            atexit.register(self.close)
        return self._hub

    def _offer(self, hub: StreamServer, node_id: int, patience: float) -> Offer:
        return Offer(
            address=self._endpoint.dial(hub.port),
            certificate=self._endpoint.root,
            token=hub.invite(self.run.run_id, node_id),
            insecure=self._endpoint.insecure,
            detached=self._detached,
            wire_dtype=self._wire_dtype or "",
            patience=patience,
            limits=self._limits,
        )

    def _invite(self, hub: StreamServer, node_ids: list[int], patience: float) -> None:
        """Send each node the one Flower message that opens its session."""
        invitations = [
            Message(
                RecordDict({OPEN_RECORD: self._offer(hub, n, patience).to_record()}),
                n,
                OPEN_TYPE,
                ttl=_OPEN_TTL,
            )
            for n in node_ids
        ]
        ids = self._grid.push_messages(invitations)
        # Flower gives None, or too few, for messages that it could not take.
        self._open_ids.update({n: i for n, i in zip(node_ids, ids, strict=False) if i})

    def _join(self, hub: StreamServer, node_ids: list[int], timeout: float) -> None:
        """Invite nodes and wait until they are connected or have failed."""
        if not node_ids:
            return
        if not self._detached:
            hub.start()
        # Ray forks while it starts, which a gRPC server in the same process does not
        # survive: in a simulation the server waits for the first reply.
        self._invite(hub, node_ids, timeout)
        failed = self._await_nodes(hub, set(node_ids), time.monotonic() + timeout)
        with hub.news:
            for node_id in node_ids:
                self._missing.pop(node_id, None)
            for node_id, reason in failed.items():
                self._open_ids.pop(node_id, None)
                hub.end(hub.links.pop(node_id), reason)
                log(WARNING, "Session: node %s did not join: %s", node_id, reason)
            self._missing.update(failed)
        log(INFO, "Session: %s nodes joined", len(node_ids) - len(failed))

    def _await_nodes(
        self, hub: StreamServer, waiting: set[int], end: float
    ) -> dict[int, str]:
        """Wait for connections; return what went wrong with the nodes without one."""
        failed: dict[int, str] = {}
        reasons = dict.fromkeys(waiting, "no answer")
        pause = _FAST_POLL if self._detached else _SLOW_POLL
        while True:
            with hub.news:
                waiting = {n for n in waiting if hub.links[n].connection is None}
                left = end - time.monotonic()
                if not waiting or left <= 0:
                    break
                hub.news.wait(min(left, pause))
            asked = {i: n for n, i in self._open_ids.items() if n in waiting}
            away: list[int] = []
            for reply in self._grid.pull_messages(list(asked)) if asked else ():
                # Not its source: the SuperLink answers for a node that is offline.
                node_id = asked[reply.metadata.reply_to_message_id]
                self._open_ids.pop(node_id, None)
                hub.start()
                if reply.has_error() and reply.error.code == _OFFLINE:
                    reasons[node_id] = "its SuperNode is offline"
                    away.append(node_id)  # it has until `end` to come back
                    continue
                reasons[node_id] = "did not connect in time"
                problem = problem_of(reply)
                if problem is not None:
                    failed[node_id] = problem
            waiting -= set(failed)
            if away:
                self._invite(hub, away, left)
        return {**failed, **{n: reasons[n] for n in waiting}}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids, in order."""
        messages = list(messages)
        plain, fast = self._sort(messages)
        self._mail.post(fast, self._find)
        if plain:
            self._plain_ids.update(self._grid.push_messages(plain))
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, each once, in order of arrival."""
        wanted = set(message_ids)
        replies = self._mail.collect(wanted)
        plain = wanted & self._plain_ids
        if plain:
            slow = list(self._grid.pull_messages(plain))
            self._plain_ids -= {r.metadata.reply_to_message_id for r in slow}
            replies.extend(slow)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies, in order of arrival."""
        end = None if timeout is None else time.monotonic() + timeout
        plain, fast = self._sort(list(messages))
        together = self._mail.post(fast, self._find)
        slow: list[Message] = []
        if plain:
            slow.extend(self._grid.send_and_receive(plain, timeout=timeout))
        self._mail.wait(together, end)
        ids = {message.metadata.message_id for message in fast}
        return [*self._mail.collect(ids), *slow]

    def _sort(self, messages: list[Message]) -> tuple[list[Message], list[Message]]:
        """Return the messages for the wrapped grid and those for sessions.

        Every node then has a session, or is known to have none.
        """
        node_ids = {message.metadata.dst_node_id for message in messages}
        with self._opening:
            hub = self._ready_hub()
            known = hub.links.keys() | self._missing.keys()
            if self._reopen:
                known = {n for n in known if is_live(hub.links.get(n))}
            self._join(hub, sorted(node_ids - known), self._open_timeout)
            plain = set(self._missing) if self._on_missing == "plain" else set()
        return (
            [m for m in messages if m.metadata.dst_node_id in plain],
            [m for m in messages if m.metadata.dst_node_id not in plain],
        )

    def _find(self, node_id: int) -> Link | str:
        link = None if self._hub is None else self._hub.links.get(node_id)
        return link or self._missing.get(node_id, "the grid is closed")

    def _give_up(self, link: Link, reason: str) -> None:
        if self._hub is not None:
            self._hub.end(link, reason)
