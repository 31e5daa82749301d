"""The thread of a node in which the app works."""

import selectors
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from logging import ERROR
from queue import SimpleQueue

from flwr.supercore import log

from .local_socket import LocalConnection


class Executor:
    """Answers the requests of sessions, one at a time, in the thread that runs it.

    All sessions of a Ray actor share one. Flower promises an app that an actor handles
    one message at a time, and torch then starts its threads once. Requests over a Unix
    socket are read in this thread as well; those of gRPC are queued.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running = False
        self.busy = False  # requests may wait unread in a socket meanwhile
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._work)

    def submit(self, work: Callable[[], None] | None) -> None:
        """Queue a call."""
        self._queue.put(work)
        with suppress(BlockingIOError):  # then it is woken already
            self._wake.send(b"w")

    def shutdown(self) -> None:
        """Make `run` return once the queue is empty."""
        self.submit(None)

    def run(self) -> None:
        """Answer requests until `shutdown` is called."""
        self._running = True
        while self._running:
            ready = self._selector.select()
            self.busy = True
            for key, _ in ready:
                key.data()
            self.busy = False
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _work(self) -> None:
        """Make the calls that are queued."""
        self._woken.recv(4096)
        while not self._queue.empty():
            work = self._queue.get()
            if work is None:
                self._running = False
                return
            try:
                work()
            except Exception as ex:  # the other sessions go on
                log(ERROR, "A session failed", exc_info=ex)

    def attach(
        self,
        connection: LocalConnection,
        on_frame: Callable[[memoryview], str | None],
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
            except Exception as ex:
                self._selector.unregister(connection.socket)
                ended.set_exception(ex)

        def register() -> None:
            self._selector.register(connection.socket, selectors.EVENT_READ, receive)

        self.submit(register)
        return ended
