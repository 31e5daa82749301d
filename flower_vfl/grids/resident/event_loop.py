"""The event loop that every stream of a process runs on, its queues and frames.

gRPC's asyncio API is faster than its blocking API and supports one event loop per
process. ClientApps are never called on the loop.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import grpc

from flower_vfl.protocol.lazy_array import Buffer

from .wire import Assembler, WireError, split_frame

MAX_FRAME: Final = 256  # bytes that a peer may send before it is authenticated
_lock: Final = threading.Lock()
# By process id, because a forked child has the loop but not its thread.
_loops: Final[dict[int, asyncio.AbstractEventLoop]] = {}


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs in a thread of its own."""
    process = os.getpid()
    with _lock:
        if process not in _loops:
            loop = _loops[process] = asyncio.new_event_loop()
            # Keeps gRPC from stopping its poller between two sessions.
            loop.call_soon(grpc.aio.init_grpc_aio)
            name = "resident-event-loop"
            threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
        return _loops[process]


class SendQueue:
    """Frames that wait to be written to one stream; any thread may add frames."""

    process = 0  # of the peer, which gRPC does not tell

    def __init__(self, peer: str = "") -> None:
        self.peer = peer
        self._chunks: deque[bytes | None] = deque()
        self.filled = asyncio.Event()  # set it on the event loop

    def put(self, *parts: Buffer) -> None:
        """Queue a frame, which the next `flush` sends."""
        self._chunks.extend(split_frame(parts))

    def close(self) -> None:
        """Make `drain` return once all queued frames are written."""
        self._chunks.append(None)
        flush([self])

    async def drain(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write queued frames to a stream until the queue is closed."""
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                if chunk is None:
                    return
                await write(chunk)
            self.filled.clear()
            if not self._chunks:
                await self.filled.wait()


def flush(connections: Iterable[Any]) -> None:
    """Send what is queued; one call for many queues, as waking the loop is slow."""
    queues = []
    for each in dict.fromkeys(connections):
        if isinstance(each, SendQueue):
            queues.append(each)
        else:  # a Unix socket
            each.flush()

    def wake() -> None:
        for queue in queues:
            queue.filled.set()

    if queues:
        event_loop().call_soon_threadsafe(wake)


async def read_frame(stream: Any) -> memoryview:
    """Read a frame of a peer that is not authenticated yet, of gRPC or local."""
    chunk = await stream.read()
    if chunk is grpc.aio.EOF:
        raise ConnectionError("the stream ended during authentication")
    frame = Assembler(MAX_FRAME).feed(chunk)
    if frame is None:
        raise WireError("malformed frame")
    return frame


async def read_frames(
    stream: Any, limit: int, on_frame: Callable[[memoryview], str | None]
) -> str | None:
    """Read the frames of a gRPC stream to its end, or until one has a result."""
    assembler = Assembler(limit)
    while (chunk := await stream.read()) is not grpc.aio.EOF:
        frame = assembler.feed(chunk)
        result = None if frame is None else on_frame(frame)
        if result is not None:
            return result
    return None
