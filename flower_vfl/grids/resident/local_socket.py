"""Unix sockets: sessions between two processes of one machine.

They carry the same frames as gRPC, each after its length, with fewer copies and thread
switches: a frame is read into the memory that its arrays then use.
"""

import asyncio
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from logging import WARNING
from pathlib import Path
from typing import Final, NoReturn, Self

import grpc
import numpy as np
from flwr.supercore import log

from flower_vfl.protocol.lazy_array import Buffer

from .authentication import RefusedError
from .event_loop import MAX_FRAME, event_loop
from .wire import ALIGNMENT, LAST, WireError, size

_LENGTH: Final = struct.Struct("<Q")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user and group of a peer
_PARTS: Final = 256  # most buffers in one call of the kernel
_TOGETHER: Final = 1 << 14  # bytes of frames that leave in one call at the latest
_READ_AHEAD: Final = 1 << 15
_BUFFER: Final = 1 << 22  # bytes that the kernel may keep, if its own limit allows them
_BACKLOG: Final = 4096
_PAUSE: Final = 1.0  # seconds until a server that could not accept tries again
_RETRY, _FINAL = b"R", b"F"  # what a refused peer learns


class Listener:
    """A Unix socket in a folder that only this user can open."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self._folder = tempfile.mkdtemp(prefix="vfl-")
        self.path = str(Path(self._folder) / "session")
        try:
            self.socket.setblocking(False)
            self.socket.bind(self.path)
            Path(self.path).chmod(0o600)
            self.socket.listen(_BACKLOG)  # nodes may connect before the server starts
        except OSError:  # the path is too long
            self.close()
            raise

    @classmethod
    def create(cls) -> Self | None:
        """Return a listener, or None if this machine has no such sockets."""
        with suppress(AttributeError, OSError):
            return cls()
        return None

    async def accept(self, serve: Callable[["LocalStream"], object]) -> None:
        """Serve each connection."""
        while True:
            try:
                connected, _ = await event_loop().sock_accept(self.socket)
            except OSError as ex:  # no more file descriptors, perhaps only for now
                log(WARNING, "Session: a node could not connect: %s", ex)
                await asyncio.sleep(_PAUSE)
            else:
                serve(LocalStream(connected))

    def close(self) -> None:
        """Stop listening and remove the folder."""
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class LocalStream:
    """Chunks of an authentication over a Unix socket, read and written as gRPC's."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected

    @classmethod
    async def connect(cls, path: str) -> Self | None:
        """Return a connection to a listener, or None if it cannot be reached."""
        with suppress(AttributeError, OSError):
            stream = cls(socket.socket(socket.AF_UNIX))
            try:
                await event_loop().sock_connect(stream.socket, path)
                return stream
            except OSError:
                stream.socket.close()
        return None

    def process(self) -> int:
        """Return the id of the process at the other end; 0 if it is not known."""
        if not hasattr(socket, "SO_PEERCRED"):
            return 0
        size = _CREDENTIALS.size
        found = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(_CREDENTIALS.unpack(found)[0])

    async def read(self) -> bytes:
        """Read a chunk; raise an error if the peer refuses or leaves."""
        [length] = _LENGTH.unpack(await self._read(_LENGTH.size))
        if length > MAX_FRAME:
            raise WireError("malformed frame")
        frame = await self._read(length)
        if frame in (_RETRY, _FINAL):
            raise RefusedError("refused by the server", retry=frame == _RETRY)
        return LAST + frame

    async def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = await event_loop().sock_recv(self.socket, count - len(found))
            if not more:
                raise ConnectionError("the stream ended during authentication")
            found += more
        return found

    async def write(self, chunk: bytes) -> None:
        """Write a chunk."""
        data = _LENGTH.pack(len(chunk) - 1) + chunk[1:]
        await event_loop().sock_sendall(self.socket, data)

    async def abort(self, code: grpc.StatusCode, _: str) -> NoReturn:
        """Refuse the peer."""
        retry = code == grpc.StatusCode.UNAVAILABLE
        await self.write(LAST + (_RETRY if retry else _FINAL))
        raise ConnectionAbortedError("refused")


class LocalConnection:
    """Frames over a Unix socket; any thread may send, one thread receives."""

    def __init__(self, stream: LocalStream, limit: int) -> None:
        self.process = stream.process()
        self.peer = f"unix:{self.process or 'unknown'}"
        self.socket = stream.socket
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._limit = limit
        self._lock = threading.Lock()
        self._unsent: deque[Buffer] = deque()
        self._queued = 0  # bytes since the last call of the kernel
        self._waiting = True  # for `start`, or until the kernel takes more bytes
        self._closing = False
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._start = self._end = 0  # of the bytes in it that no frame has used
        self._frame: memoryview | None = None  # that is being read
        self._filled = 0

    def start(self) -> None:
        """Send what is queued, and from now on what `put` and `flush` send."""
        with self._lock:
            self._write()

    def put(self, *parts: Buffer) -> None:
        """Queue a frame, which leaves with `flush` or once there are many bytes."""
        with self._lock:
            length = size(parts)
            self._unsent.append(_LENGTH.pack(length))
            self._unsent.extend(parts)
            self._queued += length
            if self._queued > _TOGETHER and not self._waiting:
                self._write()

    def flush(self) -> None:
        """Send what is queued."""
        if self._unsent:
            with self._lock:
                if not self._waiting:
                    self._write()

    def close(self) -> None:
        """End the stream once all queued frames are sent."""
        with self._lock:
            self._closing = True
            if not self._waiting:
                self._write()

    def dispose(self) -> None:
        """Close the socket; call this on the event loop."""
        with self._lock:
            self._unsent.clear()
            self._waiting = True
        event_loop().remove_writer(self.socket)
        self.socket.close()

    def _write(self) -> None:
        """Send until all is sent or the kernel takes no more; lock held."""
        self._waiting, self._queued = False, 0
        try:
            while self._unsent:
                sent = self.socket.sendmsg(islice(self._unsent, _PARTS))
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = memoryview(self._unsent[0])[sent:]
            if self._closing:
                self.socket.shutdown(socket.SHUT_RDWR)
        except BlockingIOError:
            self._waiting = True
            event_loop().call_soon_threadsafe(self._await_room)
        except OSError:  # the thread that receives gets the same error
            self._unsent.clear()

    def _await_room(self) -> None:
        if self.socket.fileno() >= 0:
            event_loop().add_writer(self.socket, self._resume)

    def _resume(self) -> None:
        event_loop().remove_writer(self.socket)
        self.start()

    def receive(self) -> Iterator[memoryview]:
        """Return the frames that have arrived; raise an error at the end."""
        drained = False
        while True:
            frame = self._next_frame()
            if frame is not None:
                yield frame
                continue
            if drained:  # the selector tells when there is more
                return
            target = self._ahead[self._end :]
            if self._frame is not None:
                target = self._frame[self._filled :]
            try:
                count = self.socket.recv_into(target)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("the connection was closed")
            drained = count < len(target)
            if self._frame is None:
                self._end += count
            else:
                self._filled += count

    def _next_frame(self) -> memoryview | None:
        """Return a frame that is complete; make room to read if there is none."""
        if self._frame is not None:
            if self._filled < len(self._frame):
                return None
            frame, self._frame = self._frame, None
            return frame
        held = self._ahead[self._start : self._end]
        if len(held) >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(held)
            if length > self._limit:
                raise WireError(f"frame over the limit of {self._limit} bytes")
            held = held[_LENGTH.size :]
            if len(held) >= length:
                self._start += _LENGTH.size + length
                return memoryview(bytes(held[:length]))
            self._frame, self._filled = _allocate(length), len(held)
            self._frame[: len(held)] = held
            self._start = self._end = 0
        elif self._start:
            self._ahead[: len(held)] = bytes(held)
            self._start, self._end = 0, len(held)
        return None


def _allocate(length: int) -> memoryview:
    """Return aligned memory that is not cleared."""
    memory = np.empty(length + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + length].data
