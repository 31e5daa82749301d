"""The nodes of one process get their requests over one Unix socket."""

from __future__ import annotations

import socket
import threading

import pytest
from flwr.app import Message, RecordDict
from resident_cases import (
    GridMaker,
    RecordingApp,
    sleep_record,
    step_record,
    sums,
    to_all,
)

from flower_vfl.grids.resident import ResidentGrid, resident
from flower_vfl.grids.resident.local_socket import LocalConnection
from flower_vfl.grids.resident.pending_requests import ServerSession
from flower_vfl.grids.resident.wire import REPLY, WireError, encode, frame_head


def sessions_of(grid: ResidentGrid) -> list[ServerSession]:
    return [*grid._get_server().sessions.values()]


def carriers(grid: ResidentGrid) -> set[object]:
    return {session.carrier for session in sessions_of(grid)}


def exchange(grid: ResidentGrid) -> list[Message]:
    messages = to_all(grid, RecordDict(), "query.echo")
    return list(grid.send_and_receive(messages, timeout=20))


def test_requests_leave_in_one_call(
    make_grid: GridMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = make_grid(8)
    grid.open()
    assert len(carriers(grid)) == 8  # until each node has answered on its own
    assert len(exchange(grid)) == 8
    assert len(carriers(grid)) == 1
    calls: list[int] = []
    write, main = LocalConnection._write, threading.get_ident()

    def counted(connection: LocalConnection) -> None:
        calls.append(threading.get_ident())
        write(connection)

    monkeypatch.setattr(LocalConnection, "_write", counted)
    assert len(exchange(grid)) == 8
    assert calls.count(main) == 1  # the requests
    assert len(calls) - 1 < 8  # the replies


def test_nodes_that_answer_in_threads_of_their_own_share_nothing(
    make_grid: GridMaker,
) -> None:
    grid = make_grid(3, detached=False)
    for _ in range(2):
        assert len(exchange(grid)) == 3
    assert len(carriers(grid)) == 3


@pytest.mark.parametrize("under_way", [False, True], ids=["idle", "during a request"])
def test_the_shared_socket_is_cut(make_grid: GridMaker, under_way: bool) -> None:
    recorder = RecordingApp()
    grid = make_grid(4, app=resident(recorder.app))
    nodes = grid.open()
    for step in range(6):
        messages = to_all(grid, step_record(step, 0.02), "train")
        if step in (2, 4):
            [shared] = carriers(grid)
            assert isinstance(shared, LocalConnection)
            recorder.started.clear()

            def cut(shared: LocalConnection = shared) -> None:
                if under_way:
                    recorder.started.wait()
                shared.socket.shutdown(socket.SHUT_RDWR)

            thread = threading.Thread(target=cut)
            thread.start()
            if not under_way:
                thread.join()
        replies = list(grid.send_and_receive(messages, timeout=60))
        assert not any(reply.has_error() for reply in replies)
    assert len(set(sums(replies).values())) == 1  # each node did the same
    for node in nodes:
        assert [s for n, s in recorder.executed if n == node] == [*range(6)]


def test_a_node_with_unanswered_requests_keeps_its_socket(make_grid: GridMaker) -> None:
    """A request on the shared one could overtake them."""
    grid = make_grid(2)
    exchange(grid)
    [shared] = carriers(grid)
    server = grid._get_server()
    [own] = [each for each in sessions_of(grid) if each.connection is not shared]
    assert isinstance(own.connection, LocalConnection)
    own.connect(own.connection)
    messages = [Message(sleep_record(0.3), own.node_id, "query.slow") for _ in range(2)]
    ids = {*grid.push_messages(messages)}
    late = memoryview(frame_head(REPLY, own.number, 1 << 40))  # to no request
    server._on_frame(own, own.connection, late)
    assert own.unanswered and own.carrier is own.connection
    while ids:
        ids -= {r.metadata.reply_to_message_id for r in grid.receive(ids, 20.0)}
    assert own.carrier is shared


def test_a_process_cannot_answer_for_a_node_of_another(make_grid: GridMaker) -> None:
    grid = make_grid(2)
    exchange(grid)
    server, (one, other) = grid._get_server(), sessions_of(grid)
    assert isinstance(one.connection, LocalConnection)
    assert isinstance(other.connection, LocalConnection)
    message = Message(RecordDict(), other.node_id, "query.echo")
    parts = [frame_head(REPLY, other.number, 1), *encode(message)]
    frame = memoryview(b"".join(parts))
    server._on_frame(one, one.connection, frame)  # nobody asked, but it may answer
    for process in (other.connection.process + 1, 0):  # 0: not known
        other.connection.process = process
        with pytest.raises(WireError, match="another session"):
            server._on_frame(one, one.connection, frame)
