"""Messages that are pushed, and replies that are pulled or waited for."""

from __future__ import annotations

import os
import threading
import time

import pytest
from flwr.app import Message
from flwr.common.constant import ErrorCode
from resident_cases import GridMaker, sleep_record, to_all, weights


def test_push_and_pull(make_grid: GridMaker) -> None:
    grid = make_grid(2)
    ids = list(grid.push_messages(to_all(grid, weights(), "train")))
    assert len(set(ids)) == 2
    got: list[Message] = []
    end = time.monotonic() + 60
    while len(got) < 2 and time.monotonic() < end:
        got += grid.pull_messages(ids)
    assert {reply.metadata.reply_to_message_id for reply in got} == set(ids)


def test_receive_waits_for_the_first_reply(make_grid: GridMaker) -> None:
    # Nodes of one actor take turns, so each has a thread of its own here.
    grid = make_grid(2, detached=False)
    one, two = grid.get_node_ids()
    slow, quick = (
        next(iter(grid.push_messages([Message(sleep_record(s), node, "query.slow")])))
        for node, s in ((one, 0.4), (two, 0.0))
    )
    [first] = grid.receive([slow, quick], 30.0)
    assert first.metadata.reply_to_message_id == quick
    assert not list(grid.receive([slow], 0.01))
    [last] = grid.receive([slow], 30.0)
    assert last.metadata.reply_to_message_id == slow


def test_a_node_handles_messages_in_order(make_grid: GridMaker) -> None:
    grid = make_grid(1)
    assert grid.ordered and not make_grid(1, on_missing="plain").ordered
    [node] = grid.get_node_ids()
    waiting = [
        next(iter(grid.push_messages([Message(weights(), node, "train")])))
        for _ in range(5)
    ]
    counts = {}
    while len(counts) < len(waiting):
        for reply in grid.receive(set(waiting) - counts.keys(), 30.0):
            count = reply.content.config_records["count"]["n"]
            counts[reply.metadata.reply_to_message_id] = count
    assert [counts[each] for each in waiting] == [1, 2, 3, 4, 5]


def test_receive_reports_a_session_that_ends(make_grid: GridMaker) -> None:
    grid = make_grid(1)
    [node] = grid.get_node_ids()
    message = Message(sleep_record(0.2), node, "query.slow")
    [waiting] = grid.push_messages([message])
    server = grid._server
    assert server is not None
    with server.condition:
        server.end(server.sessions[node], "for the test")
    [reply] = grid.receive([waiting], 30.0)
    assert reply.error.code == ErrorCode.NODE_UNAVAILABLE


def test_threads_that_wait_take_turns_reading(make_grid: GridMaker) -> None:
    grid = make_grid(2, detached=False)
    replies: dict[float, list[Message]] = {}

    def ask(node: int, seconds: float) -> None:
        message = Message(sleep_record(seconds), node, "query.slow")
        replies[seconds] = list(grid.send_and_receive([message], timeout=60))

    grid.open()
    times = (0.0, 0.3)  # the thread that reads first may have to leave first
    threads = [
        threading.Thread(target=ask, args=pair)
        for pair in zip(grid.get_node_ids(), times, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [reply.has_content() for t in times for reply in replies[t]] == [True] * 2


def test_replies_arrive_while_no_thread_waits(make_grid: GridMaker) -> None:
    grid = make_grid(1)
    ids = set(grid.push_messages(to_all(grid, weights(), "train")))
    end = time.monotonic() + 60
    while not ids <= grid._requests._replies.keys() and time.monotonic() < end:
        time.sleep(0.01)
    assert [reply.has_content() for reply in grid.pull_messages(ids)] == [True]


@pytest.mark.parametrize("nodes, waves", [(2, [2]), (3, [1, 2])])
def test_actors_start_before_many_nodes_are_placed(
    make_grid: GridMaker,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    waves: list[int],
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    grid = make_grid(nodes)
    sent = []
    push = grid._grid.push_messages
    monkeypatch.setattr(
        grid._grid, "push_messages", lambda m: sent.append(len(m)) or push(m)
    )
    assert len(grid.open()) == nodes and sent == waves
