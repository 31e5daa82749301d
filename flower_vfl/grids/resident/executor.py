"""Threads that read Unix sockets themselves: of the app, and those that wait."""

import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from logging import ERROR
from queue import SimpleQueue
from typing import Any

from flwr.supercore import log

from .local_socket import LocalConnection


class SocketReader:
    """Receives frames of Unix sockets in the thread that calls `poll`."""

    def __init__(self) -> None:
        self.busy = False  # frames may wait unread in a socket meanwhile
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)

    def wake(self) -> None:
        """End a `poll` of another thread."""
        with suppress(BlockingIOError):  # then it is woken already
            self._wake.send(b"w")

    def _on_wake(self) -> None:
        self._woken.recv(4096)

    def poll(self, timeout: float | None = None) -> None:
        """Wait for frames and pass on those that have arrived."""
        ready = self._selector.select(timeout)
        self.busy = True
        for key, _ in ready:
            key.data()
        self.busy = False

    def attach(
        self, connection: LocalConnection, on_frame: Callable[[memoryview], str | None]
    ) -> Future[str | None]:
        """Receive frames until one has a result, or until the connection ends."""
        ended: Future[str | None] = Future()
        ended.set_running_or_notify_cancel()

        def receive() -> None:
            try:
                for frame in connection.receive():
                    reason = on_frame(frame)
                    if reason is not None:
                        self._selector.unregister(connection.socket)
                        return ended.set_result(reason)
                connection.flush()
            except Exception as ex:
                self._selector.unregister(connection.socket)
                ended.set_exception(ex)

        self._selector.register(connection.socket, selectors.EVENT_READ, receive)
        return ended

    def __del__(self) -> None:
        self._selector.close()
        self._woken.close()
        self._wake.close()


class ReadingCondition(threading.Condition):
    """A condition for which one of the waiting threads reads the sockets itself."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: SocketReader | None = None
        self._thread = 0  # that reads
        self._notified = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; read meanwhile, unless another thread does."""
        reader, now = self.reader, time.monotonic
        if reader is None or timeout is None or self._thread:
            return super().wait(timeout)
        self._thread, self._notified = threading.get_ident(), False
        end = now() + timeout
        self.release()
        try:
            reader.poll(timeout)
            while not self._notified and (left := end - now()) > 0:
                reader.poll(left)
        finally:
            self.acquire()
            self._thread = 0
            super().notify_all()  # another thread may read from now on
        return self._notified

    def notify_all(self) -> None:
        """Wake all threads that wait, also the one that reads."""
        super().notify_all()
        self._notified = True
        if self.reader is not None and self._thread not in (0, threading.get_ident()):
            self.reader.wake()


class Executor(SocketReader):
    """Answers the requests of sessions, one at a time, in the thread that runs it.

    All sessions of a Ray actor share one, as Flower promises an app one message at a
    time. Requests over a Unix socket are read in this thread; those of gRPC are queued.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[object, Any] = {}  # that have authenticated the server
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running = False

    def submit(self, work: Callable[[], None] | None) -> None:
        """Queue a call; None makes `run` return."""
        self._queue.put(work)
        self.wake()

    def run(self) -> None:
        """Answer requests until the queue has a None."""
        self._running = True
        while self._running:
            self.poll()

    def _on_wake(self) -> None:
        """Make the calls that are queued."""
        super()._on_wake()
        while not self._queue.empty():
            work = self._queue.get()
            if work is None:
                self._running = False
                return
            try:
                work()
            except Exception as ex:  # the other sessions go on
                log(ERROR, "A session failed", exc_info=ex)
