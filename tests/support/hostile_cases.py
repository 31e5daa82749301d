"""Hostile streams to a `ResidentGrid`, and a small training that they disturb."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
from flwr.app import Message
from vertical_cases import rich_app

from flower_vfl import InProcessGrid, ResidentGrid, resident
from flower_vfl.grids.resident.authentication import Authentication
from flower_vfl.grids.resident.event_loop import event_loop
from flower_vfl.grids.resident.settings import METHOD
from flower_vfl.grids.resident.wire import split_frame
from flower_vfl.strategies import Defense, VerticalStrategy

KINDS: Final = ("silent", "slow", "garbage", "half a proof", "no stream")
_PAUSE: Final = 0.02  # seconds between two attempts of one attacker


class HostileStreams:
    """Attackers that open a new stream as soon as they lose one.

    They know the run and the ids of the nodes, but no token.
    """

    def __init__(
        self,
        address: str,
        count: int,
        kinds: Sequence[str] = KINDS,
        run_id: int = 0,
        nodes: Sequence[int] = (1,),
    ) -> None:
        self.opened: Counter[str] = Counter()
        self.admitted = 0
        self._address, self._run_id, self._nodes = address, run_id, nodes
        self._tasks = [
            asyncio.run_coroutine_threadsafe(self._attack(kind), event_loop())
            for kind in (kinds[number % len(kinds)] for number in range(count))
        ]

    def stop(self) -> None:
        """Close all streams."""
        for task in self._tasks:
            task.cancel()

    async def _attack(self, kind: str) -> None:
        while True:
            self.opened[kind] += 1
            with suppress(grpc.RpcError, OSError, asyncio.InvalidStateError):
                await (self._connect() if kind == "no stream" else self._open(kind))
            await asyncio.sleep(_PAUSE)

    async def _connect(self) -> None:
        host, port = self._address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while await reader.read(1024):
                pass
        finally:
            writer.close()

    async def _open(self, kind: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            call = channel.stream_stream(METHOD)()
            node = Authentication(self._run_id, secrets.choice(self._nodes))
            if kind == "silent":
                await call.read()
            elif kind == "slow":
                await asyncio.sleep(0.5)
                await call.write(split_frame([node.hello()])[0])
                await call.read()
                await call.read()
            elif kind == "garbage":
                await call.write(b"\x00" + secrets.token_bytes(60))
                await call.read()
            else:
                await call.write(split_frame([node.hello()])[0])
                await call.read()
                await asyncio.sleep(0.2)
                await call.write(split_frame([secrets.token_bytes(16)])[0])
                self.admitted += await call.read() is not grpc.aio.EOF


class CutGrid(ResidentGrid):
    """Cuts all connections before some exchanges; notes the seconds of joining.

    The seconds of a cut are those of the exchange that follows it.
    """

    def __init__(self, parties: int, cut_every: int, **options: Any) -> None:
        self.inner = InProcessGrid(resident(rich_app()), parties)
        # An advertised address keeps the nodes from using a Unix socket.
        options = {"advertise": "127.0.0.1", "open_timeout": 60.0, **options}
        super().__init__(self.inner, **options)
        self.joined: list[float] = []
        self._exchanges, self._cut_every = 0, cut_every

    def listen(self) -> str:
        """Start the server before any node joins; return its address."""
        self._get_server().start()
        return f"127.0.0.1:{self._get_server().port}"

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self._exchanges += 1
        cut = self._exchanges % self._cut_every == 0
        start = time.monotonic()
        if cut:
            self._cut()
        replies = super().send_and_receive(messages, timeout=timeout)
        if cut:
            self.joined.append(time.monotonic() - start)
        return replies

    def _cut(self) -> None:
        server = self._get_server()
        with server.condition:
            sessions = list(server.sessions.values())
            for session in sessions:
                if session.connection is not None:
                    session.connection.close()
            server.condition.wait_for(lambda: any(s.is_expected for s in sessions), 5)


def train(
    grid: CutGrid, epochs: int = 2, timeout: float = 60.0, close: bool = True
) -> dict[str, Any]:
    """Let all nodes join, train, and return the state of each party."""
    start = time.monotonic()
    grid.open()
    grid.joined.append(time.monotonic() - start)
    repeatable = Defense((), noise_seed=7)
    strategy = VerticalStrategy(batch_size=16, progress=False, defense=repeatable)
    strategy.start(grid, num_rounds=epochs, timeout=timeout)
    states = {name: p.state_dict() for name, p in grid.inner.parties().items()}
    if close:
        grid.close()
    return states
