"""What is fuzzed: each campaign returns how its cases ended, and what went wrong."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final
from unittest.mock import patch

import grpc
import torch
from flwr.app import Message, RecordDict
from fuzz_alignments import Findings, alignments, repeat
from fuzz_cases import Mutator
from hostile_cases import CutGrid, train
from vertical_cases import assert_equal

from flower_vfl.errors import VerticalError
from flower_vfl.grids.resident import session as resident_session
from flower_vfl.grids.resident.authentication import Authentication, RefusedError
from flower_vfl.grids.resident.event_loop import (
    SendQueue,
    event_loop,
    flush,
    read_frames,
)
from flower_vfl.grids.resident.local_socket import LocalConnection
from flower_vfl.grids.resident.session import NodeSession
from flower_vfl.grids.resident.settings import METHOD
from flower_vfl.grids.resident.stream_server import StreamServer
from flower_vfl.grids.resident.wire import (
    REQUEST,
    Buffer,
    FrameHead,
    WireError,
    encode,
    read_frame_head,
    split_frame,
)
from flower_vfl.protocol.messages import Content, TensorArray

_PARTIES: Final = 3
_TOGETHER: Final = 8  # strangers at the same time
# What an HTTP/2 client sends first: preface, an empty SETTINGS frame, a HEADERS frame.
_HTTP2: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    b"\x00\x00\x04\x01\x04\x00\x00\x00\x01\x83\x86\x84\x41"
)


# --- a stranger ---------------------------------------------------------------------


def strangers(mutator: Mutator, count: int) -> Findings:
    """Open streams with mutated handshakes beside a training."""
    found, expected = Findings(), train(CutGrid(_PARTIES, 1 << 30))
    grid = CutGrid(_PARTIES, cut_every=6)
    address = grid.listen()
    states: list[Any] = []

    def run() -> None:
        try:
            states.append(train(grid, close=False))
        except Exception:
            found.fail("the training failed: " + traceback.format_exc())

    training = threading.Thread(target=run)
    training.start()
    node_ids = list(grid.get_node_ids())

    async def many() -> None:
        turns = asyncio.Semaphore(_TOGETHER)

        async def one(number: int) -> None:
            async with turns:
                if number % 6 == 0:
                    await _raw_bytes(address, mutator.bytes(_HTTP2), found)
                else:
                    node_id = mutator.random.choice(node_ids)
                    await _stream(address, grid.run.run_id, node_id, mutator, found)

        await asyncio.gather(*(one(number) for number in range(count)))

    asyncio.run_coroutine_threadsafe(many(), event_loop()).result()
    training.join()
    grid.open()  # all nodes still have their sessions
    grid.close()
    if states:
        _compare(states[0], expected, found, "beside strangers")
    return found


async def _raw_bytes(address: str, data: bytes, found: Findings) -> None:
    host, port = address.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    with suppress(OSError):
        writer.write(data)
        await writer.drain()
        writer.close()
    found.ended["raw bytes"] += 1


async def _stream(
    address: str, run_id: int, node_id: int, mutator: Mutator, found: Findings
) -> None:
    """Send a hello and a proof under a wrong token, one of them or both mutated."""
    node = Authentication(run_id, node_id)
    hello, which = split_frame([node.hello()])[0], mutator.random.randrange(3)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = channel.stream_stream(METHOD)()
        try:
            async with asyncio.timeout(5.0):
                await call.write(mutator.bytes(hello) if which != 1 else hello)
                if mutator.random.random() < 0.1:
                    await call.write(mutator.bytes(hello))
                nonce = await call.read()
                node.server_nonce = bytes(nonce or b"")[1:]
                proof = split_frame([node.proof(secrets.token_bytes(32), b"node")])[0]
                await call.write(mutator.bytes(proof) if which else proof)
                if await call.read() is not grpc.aio.EOF:
                    found.fail("a stranger was admitted")
                found.ended["closed"] += 1
        except grpc.RpcError as error:
            found.ended[f"refused: {error.code().name}"] += 1
        except (TimeoutError, asyncio.InvalidStateError) as error:
            found.ended[type(error).__name__] += 1


# --- an admitted node ---------------------------------------------------------------


class _FuzzedSession(NodeSession):
    """The session of a node that mutates one of its replies."""

    node_id, at = 0, 0
    mutator = Mutator(0)
    handled_by: ClassVar[dict[int, int]] = {}

    def _answer(
        self, head: FrameHead, payload: memoryview, local: LocalConnection | None
    ) -> None:
        if (self.context.node_id, self.handled) != (self.node_id, self.at):
            super()._answer(head, payload, local)
            self.handled_by[self.context.node_id] = self.handled
            return
        parts = self._handle(payload)
        self.handled += 1
        queue = self._queue
        if queue is not None:
            frames = self.mutator.frames(self._number, head.sequence, parts)
            queue._chunks.extend(frames)
            flush([queue])


def trainings(mutator: Mutator, count: int) -> Findings:
    """Train with one mutated reply of one node each: equal weights or an error."""
    found = Findings()
    _FuzzedSession.mutator, _FuzzedSession.node_id = mutator, 0
    with patch.object(resident_session, "NodeSession", _FuzzedSession):
        expected = train(CutGrid(_PARTIES, 1 << 30), epochs=1)
        handled = dict(_FuzzedSession.handled_by)
        for number in range(count):
            _FuzzedSession.node_id = 1 + mutator.random.randrange(_PARTIES)
            _FuzzedSession.at = mutator.random.randrange(
                handled[_FuzzedSession.node_id]
            )
            where = f"training {number}"
            grid = CutGrid(_PARTIES, 1 << 30)
            start = time.monotonic()
            try:
                states = train(grid, epochs=1, timeout=0.3)
                _compare(states, expected, found, f"{where}: {mutator.note[:2000]}")
            except VerticalError as error:
                found.ended[f"error: {type(error).__name__}"] += 1
            except Exception:
                found.fail(f"{where}: {mutator.note[:2000]}: {traceback.format_exc()}")
            finally:
                grid.close()
            if time.monotonic() - start > 60.0:
                found.fail(f"{where}: {time.monotonic() - start:.1f} s")
    return found


def _compare(states: Any, expected: Any, found: Findings, where: str) -> None:
    try:
        assert_equal(states, expected)
        found.ended["equal weights"] += 1
    except AssertionError as error:
        found.fail(f"{where}: other weights: {error}")


class _Recorder(NodeSession):
    """Keeps all requests and replies of a training as frames."""

    sessions: ClassVar[list[NodeSession]] = []
    requests: ClassVar[list[tuple[NodeSession, bytes]]] = []

    def _handle(self, payload: memoryview) -> list[Buffer]:
        if self not in self.sessions:
            self.sessions.append(self)
        self.requests.append((self, bytes(payload)))
        return super()._handle(payload)


class _FakeStream:
    """A stream that gives some chunks and takes all."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self.written: list[bytes] = []

    async def read(self) -> Any:
        return next(self._chunks, grpc.aio.EOF)

    async def write(self, chunk: bytes) -> None:
        self.written.append(chunk)


def replies(mutator: Mutator, count: int) -> Findings:
    """Let the server read mutated replies: an error, or a message like the sent one."""
    found = Findings()
    grid = CutGrid(_PARTIES, 1 << 30)
    grid.listen()
    server: StreamServer = grid._get_server()
    nodes = list(grid.get_node_ids())

    def one(number: int) -> None:
        node = nodes[number % _PARTIES]
        server.create_session(grid.run.run_id, node)
        session = server.sessions[node]
        connection = SendQueue("ipv4:127.0.0.1:1")
        session.connect(connection)
        message = Message(RecordDict(), node, "query")
        group = grid._requests.send([message], lambda _: session)
        reply = Message(_content(number), reply_to=message)
        reply.metadata.__dict__["_message_id"] = "reply"
        chunks = mutator.frames(session.number, 0, encode(reply))
        stream = _FakeStream(chunks)
        handle = partial(server._on_frame, session, connection)
        receive = read_frames(stream, server._limits.max_frame, handle)
        work = server._read(receive, session, connection)
        asyncio.run_coroutine_threadsafe(work, event_loop()).result(10)
        with server.condition:
            server.end(session, "the case is over")
        grid._requests.wait(group, time.monotonic() + 5)
        got = grid._requests.collect({message.metadata.message_id})
        if len(got) != 1:
            found.fail(f"reply {number}: {len(got)} replies")
        elif got[0].has_error():
            found.ended["error reply"] += 1
        elif got[0].metadata.src_node_id != node:
            found.fail(f"reply {number}: from node {got[0].metadata.src_node_id}")
        else:
            found.ended["a reply"] += 1

    repeat(count, one, found)
    grid.close()
    return found


def _content(number: int) -> RecordDict:
    content = Content({"name": "passive-1", "step": number}, metrics={"loss": 0.5})
    if number % 2:
        content.arrays = {"passive-1": TensorArray(torch.zeros(4, 3))}
    return content.records()


# --- what reaches a node ------------------------------------------------------------


def requests(mutator: Mutator, count: int) -> Findings:
    """Let nodes read mutated frames of a server, real and pretended."""
    found = Findings()
    _Recorder.sessions, _Recorder.requests = [], []
    grid = CutGrid(_PARTIES, 1 << 30)
    with patch.object(resident_session, "NodeSession", _Recorder):
        train(grid, epochs=1)
    recorded = list(_Recorder.requests)

    def one(number: int) -> None:
        session, payload = mutator.random.choice(recorded)
        if number % 4 == 0:
            found.ended[_pretend(session, mutator)] += 1
            return
        chunks = mutator.frames(session._number, 1 << 40 | number, [payload])
        chunks = [b"\x00" + REQUEST + c[2:] if c[1:2] == b"R" else c for c in chunks]
        frames: list[memoryview] = []
        session._executor = _Collector(session, frames)  # type: ignore[assignment]
        limit = session._offer.limits.max_frame
        work = read_frames(_FakeStream(chunks), limit, session._on_frame)
        try:
            asyncio.run_coroutine_threadsafe(work, event_loop()).result(10)
            for frame in frames:
                session._answer(*read_frame_head(frame), None)
            found.ended["answered" if frames else "ignored"] += 1
        except WireError:
            found.ended["refused"] += 1

    repeat(count, one, found)
    return found


class _Collector:
    """Takes the place of an executor."""

    def __init__(self, session: NodeSession, frames: list[memoryview]) -> None:
        self.sessions = {session._number: session}
        self._frames = frames

    def submit(self, work: partial[None]) -> None:
        self._frames.append(work.args[0])


def _pretend(session: NodeSession, mutator: Mutator) -> str:
    """Authenticate a node with a server that does not have its token."""
    nonce, proof = (split_frame([secrets.token_bytes(32)])[0] for _ in range(2))
    stream = _FakeStream([mutator.bytes(nonce), mutator.bytes(proof)])
    work = session._authenticate(stream, SendQueue())
    try:
        asyncio.run_coroutine_threadsafe(work, event_loop()).result(10)
    except (RefusedError, WireError, ConnectionError):
        return "server refused"
    raise AssertionError("a node accepted a server without its token")


CAMPAIGNS: Final[dict[str, tuple[Callable[[Mutator, int], Findings], int]]] = {
    "streams of strangers": (strangers, 3000),
    "trainings with a reply of an admitted node": (trainings, 1500),
    "replies read by the server": (replies, 2500),
    "frames read by a node": (requests, 1500),
    "messages of an alignment": (alignments, 1500),
}
"""Each campaign with its part of 10,000 cases."""


def run_campaign(name: str, seed: int, cases: int) -> tuple[Findings, float]:
    """Run the part of so many cases in all that one campaign has; with the seconds."""
    campaign, share = CAMPAIGNS[name]
    start = time.monotonic()
    findings = campaign(Mutator(seed), max(1, share * cases // 10_000))
    return findings, time.monotonic() - start
