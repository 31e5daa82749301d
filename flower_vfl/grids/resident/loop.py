"""The one event loop of a process that every stream runs on.

gRPC's asyncio API takes a third of the time of its blocking one for eight parties, and
wants one loop per process. Apps are never called on it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import grpc

from .wire import Buffer, chunks


class _Home:
    """Starts the loop when it is first asked for, once in every process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the running loop."""
        with self._lock:
            # A forked child has the object but not the thread.
            if self._loop is None or self._process != os.getpid():
                self._loop, self._process = asyncio.new_event_loop(), os.getpid()
                # Keeps gRPC from tearing its poller down between two sessions.
                self._loop.call_soon(grpc.aio.init_grpc_aio)
                threading.Thread(
                    target=self._loop.run_forever, name="resident-loop", daemon=True
                ).start()
            return self._loop


_HOME: Final = _Home()


def the_loop() -> asyncio.AbstractEventLoop:
    """Return the process's loop, which runs in a thread of its own."""
    return _HOME.get()


class Outbox:
    """Frames on their way to one stream; any thread may add to it."""

    def __init__(self) -> None:
        self._queue: deque[bytes | None] = deque()
        self._filled = asyncio.Event()

    def add(self, *parts: Buffer) -> None:
        """Queue a frame; it leaves with the next `flush`."""
        self._queue.extend(chunks(parts))

    def end(self) -> None:
        """Let `drain` return once everything queued has left."""
        self._queue.append(None)
        flush([self])

    async def drain(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write what is queued to a stream until `end` is called."""
        while True:
            while self._queue:
                chunk = self._queue.popleft()
                if chunk is None:
                    return
                await write(chunk)
            self._filled.clear()
            if not self._queue:
                await self._filled.wait()

    def wake(self) -> None:
        """Make `drain` look at the queue; call on the loop."""
        self._filled.set()


def flush(outboxes: Sequence[Outbox]) -> None:
    """Send what is queued; one call for many, because waking the loop costs most."""

    def wake() -> None:
        for outbox in outboxes:
            outbox.wake()

    if outboxes:
        the_loop().call_soon_threadsafe(wake)
