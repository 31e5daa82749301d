"""Sessions over Unix sockets: who may open them, what they refuse, what they carry."""

from __future__ import annotations

import errno
import logging
import random
import socket
import stat
import struct
import time
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from resident_cases import RUN_ID, GridMaker, to_all, weights

from flower_vfl.grids.resident import (
    Limits,
    ResidentGrid,
    local_socket,
    stream_server,
)
from flower_vfl.grids.resident.authentication import Authentication
from flower_vfl.grids.resident.event_loop import SendQueue, event_loop
from flower_vfl.grids.resident.local_socket import LocalConnection, LocalStream
from flower_vfl.grids.resident.wire import (
    REPLY,
    WireError,
    decode,
    encode,
    frame_head,
    read_frame_head,
)
from flower_vfl.protocol.messages import Content, TensorArray, Verb, request, to_tensor

LENGTH = struct.Struct("<Q")


def connection_types(grid: ResidentGrid) -> set[type]:
    assert grid._server is not None
    return {type(session.connection) for session in grid._server.sessions.values()}


def test_only_its_user_can_open_the_socket(make_grid: GridMaker) -> None:
    grid = make_grid(2)
    grid.open()
    assert connection_types(grid) == {LocalConnection}
    path = Path(grid._get_server().path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    grid.close()
    assert not path.parent.exists()


def test_a_node_that_cannot_open_the_socket_uses_grpc(make_grid: GridMaker) -> None:
    grid = make_grid(2)
    Path(grid._get_server().path).unlink()
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train"), timeout=20))
    assert [reply.has_content() for reply in replies] == [True, True]
    assert connection_types(grid) == {SendQueue}


def test_nodes_join_after_files_have_run_out(
    make_grid: GridMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = event_loop().sock_accept, [errno.EMFILE, errno.ECONNABORTED]

    async def scarce(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), "for the test")
        return await accept(listening)

    monkeypatch.setattr(local_socket, "_PAUSE", 0.01)
    monkeypatch.setattr(event_loop(), "sock_accept", scarce)
    grid = make_grid(2)
    assert len(grid.open(timeout=5.0)) == 2 and not failures
    assert connection_types(grid) == {LocalConnection}


@pytest.mark.parametrize(
    "options",
    [{"advertise": "127.0.0.1"}, {"address": "0.0.0.0:0", "advertise": "127.0.0.1"}],
    ids=["advertised", "all interfaces"],
)
def test_no_socket_for_other_machines(
    make_grid: GridMaker, options: dict[str, str]
) -> None:
    grid = make_grid(1, insecure=True, **options)
    grid.open()
    assert grid._get_server().path == ""
    assert connection_types(grid) == {SendQueue}


class Stranger:
    """A process of the same user that does not follow the protocol."""

    def __init__(self, grid: ResidentGrid) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5.0)
        self.socket.connect(grid._get_server().path)

    def send(self, frame: bytes) -> None:
        self.socket.sendall(LENGTH.pack(len(frame)) + frame)

    def authenticate(self, token: bytes, node_id: int) -> None:
        node = Authentication(RUN_ID, node_id)
        self.send(node.hello())
        node.server_nonce = self.socket.recv(40)[8:]
        self.send(node.proof(token, b"node"))

    def rest(self) -> bytes:
        """Return what the server still sends until it closes the connection."""
        found = b""
        while more := self.socket.recv(4096):
            found += more
        return found


FINAL, RETRY = (LENGTH.pack(1) + kind for kind in (b"F", b"R"))


def test_strangers_are_refused(
    make_grid: GridMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    grid = make_grid(1, limits=Limits(authenticate=0.5, max_frame=1000))
    [node] = grid.open()
    server = grid._get_server()
    token = server._tokens._tokens[RUN_ID, node]

    def outcome(act: str) -> bytes:
        stranger = Stranger(grid)
        if act == "garbage":
            stranger.send(b"GET / HTTP/1.1" * 4)
        elif act == "huge":
            stranger.socket.sendall(LENGTH.pack(1 << 60))
        elif act == "wrong token":
            stranger.authenticate(bytes(32), node)
        elif act == "second connection":
            stranger.authenticate(token, node)
        return stranger.rest()

    wanted = {
        "silence": (RETRY, "too long"),
        "garbage": (FINAL, "malformed"),
        "huge": (FINAL, "malformed"),
        "wrong token": (FINAL, "wrong proof"),
        "second connection": (RETRY, "already connected"),
    }
    for act, (answer, reason) in wanted.items():
        caplog.clear()
        assert outcome(act) == answer, act
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith("Session refused: peer unix:") and reason in line
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"), timeout=20)
    assert reply.has_content()


def test_an_oversized_frame_ends_the_session(make_grid: GridMaker) -> None:
    grid = make_grid(1, limits=Limits(max_frame=1000))
    grid.open()
    server = grid._get_server()
    stranger = Stranger(grid)
    stranger.authenticate(server.create_session(RUN_ID, 4242), 4242)
    assert len(stranger.socket.recv(40)) == 40  # the server's own proof
    stranger.socket.sendall(LENGTH.pack(1001))
    assert b"over the limit" in stranger.rest()
    assert "over the limit" in str(server.sessions[4242].end_reason)


def test_the_connection_of_a_node_that_does_not_read_is_closed(
    make_grid: GridMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "_GRACE", 0.1)
    grid = make_grid(1)
    grid.open()
    server, stranger = grid._get_server(), Stranger(grid)
    stranger.authenticate(server.create_session(RUN_ID, 4242), 4242)
    assert len(stranger.socket.recv(40)) == 40  # the server's own proof
    large = RecordDict({"r": ConfigRecord({"x": bytes(20_000_000)})})
    grid.push_messages([Message(large, 4242, "query.echo")])
    connection = server.sessions[4242].connection
    assert isinstance(connection, LocalConnection) and connection._unsent
    grid.close()
    end = time.monotonic() + 5
    while server._local and time.monotonic() < end:
        time.sleep(0.01)
    assert not server._local and connection.socket.fileno() < 0


def test_many_large_messages_are_under_way_in_both_directions(
    make_grid: GridMaker,
) -> None:
    grid = make_grid(2)
    content = RecordDict({"r": ConfigRecord({"x": bytes(range(256)) * 20_000})})
    messages = [m for _ in range(3) for m in to_all(grid, content, "query.echo")]
    waiting = set(grid.push_messages(messages))
    end = time.monotonic() + 60
    while waiting and time.monotonic() < end:
        for reply in grid.pull_messages(waiting):
            assert reply.content == content
            waiting.discard(reply.metadata.reply_to_message_id)
        time.sleep(0.005)
    assert not waiting


def pair(limit: int = 1 << 24) -> tuple[socket.socket, LocalConnection]:
    near, far = socket.socketpair()
    return near, LocalConnection(LocalStream(far), limit)


def test_frames_in_any_pieces_arrive_as_they_left() -> None:
    near, connection = pair()
    generator = random.Random(0)
    sizes = [0, 1, 7, 8, 9, (1 << 15) - 9, (1 << 15) - 8, 1 << 15, 100_000, 0, 3]
    frames = [generator.randbytes(size) for size in sizes]
    stream = b"".join(LENGTH.pack(len(frame)) + frame for frame in frames)
    found = []
    while stream:
        count = generator.choice([1, 5, 8, 30, 4096, 60_000])
        near.sendall(stream[:count])
        stream = stream[count:]
        found += [bytes(frame) for frame in connection.receive()]
    assert found == frames
    near.close()
    with pytest.raises(ConnectionError):
        list(connection.receive())
    connection.socket.close()


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    near, connection = pair(limit=100)
    near.sendall(LENGTH.pack(101))
    with pytest.raises(WireError, match="over the limit"):
        list(connection.receive())
    near.close()
    connection.socket.close()


def test_a_tensor_uses_the_memory_in_which_it_arrived() -> None:
    near, connection = pair()
    arrays = {"a": torch.randn(300, 127), "b": torch.randn(1024, 33).T}
    content = Content(arrays={k: TensorArray(v) for k, v in arrays.items()}, step=1)
    message = request(Verb.TRAIN_STEP, 5, 1, content)
    parts = [frame_head(REPLY, 0, 0), *encode(message)]
    payload = b"".join(parts)
    found = []
    sent = LENGTH.pack(len(payload)) + payload
    for start in range(0, len(sent), 1 << 16):
        near.sendall(sent[start : start + (1 << 16)])
        found += list(connection.receive())
    [frame] = found
    got = decode(read_frame_head(frame)[1]).content["vfl-arrays"]
    begin = torch.frombuffer(frame, dtype=torch.uint8).data_ptr()
    for name, tensor in arrays.items():
        read = to_tensor(got[name])
        assert torch.equal(read, tensor)
        assert begin <= read.data_ptr() < begin + len(frame)
        assert read.data_ptr() % 64 == 0
    near.close()
    connection.socket.close()
