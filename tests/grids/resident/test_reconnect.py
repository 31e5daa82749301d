from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.constant import ErrorCode
from resident_cases import (
    GridMaker,
    Proxy,
    RecordingApp,
    sleep_record,
    step_record,
    sums,
    to_all,
    weights,
)

from flower_vfl.grids.resident import Limits, ResidentGrid, resident
from flower_vfl.grids.resident.local_socket import LocalConnection


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.stop()


def through(make_grid: GridMaker, proxy: Proxy, nodes: int, **options: object):  # type: ignore[no-untyped-def]
    return make_grid(nodes, address=proxy.behind, advertise=proxy.address, **options)


def test_a_cut_while_the_app_works_costs_nothing_but_time(
    proxy: Proxy, make_grid: GridMaker, detached: bool
) -> None:
    recorder = RecordingApp()
    grid = through(make_grid, proxy, 1, app=resident(recorder.app), detached=detached)
    nodes = grid.open()
    recorder.started.clear()

    def cut() -> None:
        recorder.started.wait()
        proxy.cut()

    threading.Thread(target=cut).start()
    [reply] = grid.send_and_receive(
        to_all(grid, step_record(1, 0.2), "train"), timeout=20
    )
    assert sums([reply]) == {nodes[0]: 1}
    time.sleep(0.1)  # a second execution would have begun by now
    assert recorder.executed == [(nodes[0], 1)]
    assert proxy.made == 2


def cut_sockets(grid: ResidentGrid, cuts: list[object]) -> None:
    for session in grid._get_server().sessions.values():
        connection = session.connection
        if isinstance(connection, LocalConnection):
            with suppress(OSError):  # it is closed already
                connection.socket.shutdown(socket.SHUT_RDWR)
                cuts.append(connection)


@pytest.mark.parametrize("local", [False, True], ids=["grpc", "unix"])
def test_many_cuts_give_the_same_result_and_no_step_twice(
    proxy: Proxy, make_grid: GridMaker, local: bool
) -> None:
    steps, nodes = 30, 3
    calm, disturbed = RecordingApp(), RecordingApp()
    steady_grid = make_grid(nodes, app=resident(calm.app))
    # A busy machine may need long to reconnect.
    limits = Limits(silence=20.0, authenticate=2.0)
    app, cuts = resident(disturbed.app), list[object]()
    if local:
        cut_grid = make_grid(nodes, app=app, limits=limits)
        cut = partial(cut_sockets, cut_grid, cuts)
    else:
        cut_grid = through(make_grid, proxy, nodes, app=app, limits=limits)
        cut = proxy.cut
    generator = random.Random(3)
    results = []
    for grid in (steady_grid, cut_grid):
        grid.open()
        for step in range(steps):
            messages = to_all(grid, step_record(step), "train")
            if grid is cut_grid and step % 2:  # before, during or after the exchange
                threading.Timer(generator.uniform(0.0, 0.006), cut).start()
            replies = list(grid.send_and_receive(messages, timeout=60))
            assert not any(reply.has_error() for reply in replies)
        results.append(sums(replies))
    made = len({id(each) for each in cuts}) if local else proxy.made
    assert made > 5 * nodes  # they did lose their connections
    assert results[0] == results[1]
    for node in results[0]:
        assert [s for n, s in disturbed.executed if n == node] == list(range(steps))


def test_messages_wait_for_a_disconnected_node(
    proxy: Proxy, make_grid: GridMaker
) -> None:
    grid = through(make_grid, proxy, 1)
    grid.open()
    proxy.closed = True
    proxy.cut()
    time.sleep(0.1)

    def back() -> None:
        proxy.closed = False

    threading.Timer(0.4, back).start()
    start = time.monotonic()
    [reply] = grid.send_and_receive(to_all(grid, weights(1.0), "train"), timeout=20)
    assert reply.has_content()
    assert time.monotonic() - start > 0.3


def test_a_node_that_stays_disconnected_is_named_in_errors(
    proxy: Proxy, make_grid: GridMaker, detached: bool
) -> None:
    limits = Limits(silence=0.5, authenticate=1.0)
    grid: ResidentGrid = through(
        make_grid, proxy, 1, limits=limits, detached=detached, open_timeout=5.0
    )
    [node] = grid.open()
    grid.send_and_receive(to_all(grid, weights(), "train"), timeout=20)
    proxy.closed = True
    proxy.cut()
    start = time.monotonic()
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"), timeout=60)
    assert 0.4 < time.monotonic() - start < 30.0
    assert reply.error.code == ErrorCode.NODE_UNAVAILABLE
    assert f"node {node}" in str(reply.error.reason)
    # Further messages fail at once: what the node knew is lost.
    start = time.monotonic()
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"), timeout=20)
    assert reply.has_error() and time.monotonic() - start < 4.0  # of 5 to open
    # A new session can be opened with it.
    proxy.closed = False
    assert grid.open() == [node]
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"), timeout=20)
    assert reply.has_content()


def test_one_lost_node_does_not_hold_up_the_replies_of_others(
    proxy: Proxy, make_grid: GridMaker
) -> None:
    limits = Limits(silence=0.4, authenticate=1.0)
    far: ResidentGrid = through(make_grid, proxy, 2, limits=limits, detached=False)
    far.open()
    messages = to_all(far, sleep_record(0.0), "query.slow")
    list(far.send_and_receive(messages))
    proxy.closed = True
    proxy.cut()
    replies = list(far.send_and_receive(to_all(far, sleep_record(0.0), "query.slow")))
    assert [reply.has_error() for reply in replies] == [True, True]


def test_large_messages_survive_a_cut(proxy: Proxy, make_grid: GridMaker) -> None:
    grid = through(make_grid, proxy, 1)
    content = RecordDict({"r": ConfigRecord({"x": bytes(range(256)) * 40_000})})
    grid.open()
    threading.Timer(0.02, proxy.cut).start()
    for _ in range(3):
        [reply] = grid.send_and_receive(to_all(grid, content, "query.echo"), timeout=20)
        assert reply.content == content
    assert proxy.made >= 2


def test_a_dead_server_ends_the_session(proxy: Proxy, make_grid: GridMaker) -> None:
    limits = Limits(silence=0.4, authenticate=1.0)
    grid = through(make_grid, proxy, 1, limits=limits, detached=False)
    list(grid.send_and_receive(to_all(grid, weights(), "train"), timeout=20))
    plain = grid._grid
    proxy.closed = True
    proxy.cut()
    end = time.monotonic() + 60
    while not plain.replies and time.monotonic() < end:
        time.sleep(0.02)
    [reply] = plain.replies.values()
    [report] = reply.content.config_records.values()
    assert report["state"] == "ended" and "no server" in str(report["reason"])
