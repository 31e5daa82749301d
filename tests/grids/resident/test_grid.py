from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from resident_cases import (
    GridMaker,
    PlainGrid,
    all_record_types,
    counting_app,
    sleep_record,
    to_all,
    weights,
)

from flower_vfl.errors import ConfigError
from flower_vfl.grids.resident import Limits, ResidentGrid, SessionError, resident
from flower_vfl.grids.resident.settings import OPEN_RECORD, OPEN_TYPE


def plain_of(grid: ResidentGrid) -> PlainGrid:
    plain = grid._grid
    assert isinstance(plain, PlainGrid)
    return plain


def waiting_app() -> tuple[ClientApp, threading.Event]:
    """Return an app whose `query.wait` is answered once the event is set."""
    app, finish = counting_app(), threading.Event()

    @app.query("wait")
    def wait(message: Message, context: Context) -> Message:
        finish.wait(60)
        return Message(message.content, reply_to=message)

    return resident(app), finish


def test_replies_are_those_of_the_plain_grid(
    make_grid: GridMaker, detached: bool
) -> None:
    grid = make_grid(3, detached=detached)
    plain = PlainGrid(counting_app(), 3)
    for number in range(4):
        both = []
        for each in (grid, plain):
            sent = to_all(each, weights(number), "train")
            replies = list(each.send_and_receive(sent))
            replies.sort(key=lambda reply: reply.metadata.src_node_id)
            ids = [message.metadata.message_id for message in sent]
            assert [r.metadata.reply_to_message_id for r in replies] == ids
            both.append(replies)
        for reply, wanted in zip(*both, strict=True):
            assert reply.content == wanted.content
            for name in ("run_id", "src_node_id", "dst_node_id", "message_type"):
                assert getattr(reply.metadata, name) == getattr(wanted.metadata, name)
            assert reply.metadata.message_id
            assert reply.content.config_records["count"]["n"] == number + 1
    # One ordinary message per node, and the rest went over the sessions.
    assert [m.metadata.message_type for m in plain_of(grid).sent] == [OPEN_TYPE] * 3


def test_a_simulation_keeps_no_message_of_an_open_session(
    make_grid: GridMaker,
) -> None:
    grid = make_grid(12)
    grid.open()
    assert len(plain_of(grid).sent) == 12
    assert plain_of(grid).replies == {}


def test_every_kind_of_record_arrives(make_grid: GridMaker) -> None:
    grid = make_grid(1)
    [reply] = grid.send_and_receive(to_all(grid, all_record_types(), "query.echo"))
    assert reply.content == all_record_types()


def test_an_exception_comes_back_as_on_the_plain_grid(
    make_grid: GridMaker, detached: bool
) -> None:
    grid = make_grid(2, detached=detached)
    plain = PlainGrid(counting_app(), 2)
    for kind in ("evaluate", "query.unknown"):
        errors = []
        for each in (grid, plain):
            replies = each.send_and_receive(to_all(each, weights(), kind))
            errors.append([reply.error for reply in replies])
        assert errors[0] == errors[1]
        assert errors[0][0].code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    # The session goes on.
    [first, _] = grid.send_and_receive(to_all(grid, weights(), "train"))
    assert first.content.config_records["count"]["n"] == 1


def test_an_app_that_exits_ends_only_its_call(make_grid: GridMaker) -> None:
    app = counting_app()

    @app.query("exit")
    def leave(message: Message, context: Context) -> Message:
        raise SystemExit(3)

    grid = make_grid(1, app=resident(app))
    [reply] = grid.send_and_receive(to_all(grid, weights(), "query.exit"))
    assert "SystemExit" in str(reply.error.reason)
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"))
    assert reply.has_content()


def test_registering_on_the_resident_app_registers_on_the_wrapped_one(
    make_grid: GridMaker,
) -> None:
    inner = ClientApp()
    app = resident(inner)
    seen: list[str] = []

    @app.train("one")
    @app.evaluate("one")
    @app.query("one")
    def handle(message: Message, context: Context) -> Message:
        seen.append(message.metadata.message_type)
        return Message(message.content, reply_to=message)

    grid = make_grid(1, app=app)
    for kind in ("train.one", "evaluate.one", "query.one"):
        [reply] = grid.send_and_receive(to_all(grid, RecordDict(), kind))
        assert reply.has_content()
    assert seen == ["train.one", "evaluate.one", "query.one"]


def test_a_blocking_session_ends_with_the_grid_and_keeps_the_state(
    make_grid: GridMaker,
) -> None:
    grid = make_grid(1, detached=False)
    for _ in range(3):
        list(grid.send_and_receive(to_all(grid, weights(), "train")))
    plain = plain_of(grid)
    assert plain.replies == {}
    grid.close()
    # `close` has waited for the client's process and taken its last reply.
    assert plain.replies == {}
    [context] = plain.contexts.values()
    assert context.state.config_records["count"]["n"] == 3


def test_a_timeout_returns_what_is_there_and_the_rest_can_be_pulled(
    make_grid: GridMaker,
) -> None:
    app, finish = waiting_app()
    grid = make_grid(2, app=app, detached=False)
    first, second = grid.open()
    messages = [
        Message(sleep_record(0.0), first, "query.slow"),
        Message(sleep_record(0.0), second, "query.wait"),
    ]
    replies = list(grid.send_and_receive(messages, timeout=0.5))
    assert [reply.metadata.src_node_id for reply in replies] == [first]
    late = messages[1].metadata.message_id
    assert list(grid.pull_messages([late])) == []
    finish.set()
    [reply] = grid.receive([late], 30.0)
    assert reply.metadata.src_node_id == second
    assert list(grid.pull_messages([late])) == []


def test_replies_come_in_order_of_arrival(make_grid: GridMaker) -> None:
    grid = make_grid(3, detached=False)
    nodes = grid.open()
    messages = [
        Message(sleep_record(seconds), node, "query.slow")
        for node, seconds in zip(nodes, (0.4, 0.0, 0.2), strict=True)
    ]
    replies = grid.send_and_receive(messages)
    order = [reply.metadata.src_node_id for reply in replies]
    assert order == [nodes[1], nodes[2], nodes[0]]


def test_a_message_expires_with_its_ttl(make_grid: GridMaker) -> None:
    app, finish = waiting_app()
    grid = make_grid(1, app=app, detached=False)
    [node] = grid.open()
    message = Message(sleep_record(0.0), node, "query.wait", ttl=0.2)
    [reply] = grid.send_and_receive([message])
    assert not finish.is_set() and str(node) in str(reply.error.reason)
    finish.set()


def test_a_message_may_live_for_a_year(make_grid: GridMaker) -> None:
    grid = make_grid(1)
    asked = Message(RecordDict(), *grid.open(), "query.echo", ttl=365 * 24 * 3600.0)
    assert [each.has_content() for each in grid.send_and_receive([asked])] == [True]


def test_arrays_far_above_the_default_of_grpc(make_grid: GridMaker) -> None:
    grid = make_grid(2)
    values = np.random.default_rng(2).normal(size=(3_000_000,)).astype(np.float32)
    content = RecordDict({"a": ArrayRecord({"x": Array(values)})})
    replies = list(grid.send_and_receive(to_all(grid, content, "query.echo")))
    assert [reply.content for reply in replies] == [content, content]


def test_what_is_over_the_frame_limit_is_an_error_on_either_side(
    make_grid: GridMaker,
) -> None:
    app = counting_app()

    @app.query("grow")
    def grow(message: Message, context: Context) -> Message:
        big = ConfigRecord({"x": bytes(200_000)})
        return Message(RecordDict({"r": big}), reply_to=message)

    grid = make_grid(1, app=resident(app), limits=Limits(max_frame=100_000))
    node = str(plain_of(grid).get_node_ids()[0])
    big = RecordDict({"r": ConfigRecord({"x": bytes(200_000)})})
    [reply] = grid.send_and_receive(to_all(grid, big, "query.echo"))
    assert "limit" in str(reply.error.reason) and node in str(reply.error.reason)
    [reply] = grid.send_and_receive(to_all(grid, RecordDict(), "query.grow"))
    assert "limit" in str(reply.error.reason)
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"))
    assert reply.has_content()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_both_ways(make_grid: GridMaker, dtype: str) -> None:
    grid = make_grid(1, wire_dtype=dtype)
    values = np.linspace(-3, 3, 1000, dtype=np.float32)
    content = RecordDict({"a": ArrayRecord({"x": Array(values)})})
    [reply] = grid.send_and_receive(to_all(grid, content, "query.echo"))
    got = reply.content.array_records["a"]["x"].numpy()
    np.testing.assert_allclose(got, values, rtol=2**-8)
    assert not np.array_equal(got, values)


def test_sixty_four_nodes(make_grid: GridMaker) -> None:
    grid = make_grid(64)
    before = set(threading.enumerate())
    assert len(grid.open()) == 64
    for number in range(3):
        replies = list(grid.send_and_receive(to_all(grid, weights(number), "train")))
        counts = [r.content.config_records["count"]["n"] for r in replies]
        assert counts == [number + 1] * 64
    # All sessions share an event loop and an executor. The threads of the plain grid
    # may still return its replies.
    started = set(threading.enumerate()) - before
    assert len([each for each in started if "(_call)" not in each.name]) < 30


def test_calls_of_one_process_never_overlap(make_grid: GridMaker) -> None:
    app = ClientApp()
    inside = threading.Semaphore(1)
    names = set()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        assert inside.acquire(blocking=False)
        names.add(threading.get_ident())
        time.sleep(0.002)
        inside.release()
        return Message(RecordDict(), reply_to=message)

    grid = make_grid(16, app=resident(app))
    for _ in range(3):
        replies = grid.send_and_receive(to_all(grid, RecordDict(), "query"))
        assert not any(reply.has_error() for reply in replies)
    assert len(names) == 1


def test_nodes_that_do_not_join_are_named(make_grid: GridMaker, detached: bool) -> None:
    grid = make_grid(3, unresponsive=[1001], detached=detached)
    with pytest.raises(SessionError, match="node 1001") as caught:
        grid.open(timeout=0.4)
    assert list(caught.value.reasons) == [1001]
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert len(replies) == 3
    [bad] = [reply for reply in replies if reply.has_error()]
    assert bad.error.code == ErrorCode.NODE_UNAVAILABLE
    assert "node 1001" in str(bad.error.reason)
    # Once it responds it can join.
    plain_of(grid).unresponsive.clear()
    assert grid.open() == [1000, 1001, 1002]
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert not any(reply.has_error() for reply in replies)


def test_an_app_that_is_not_resident_is_named_or_used_over_the_plain_grid(
    make_grid: GridMaker, detached: bool
) -> None:
    grid = make_grid(2, app=counting_app(), detached=detached)
    with pytest.raises(SessionError, match="resident_open"):
        grid.open(timeout=600.0)  # it does not wait so long
    grid = make_grid(2, app=counting_app(), detached=detached, on_missing="plain")
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert [r.content.config_records["count"]["n"] for r in replies] == [1, 1]
    ids = list(grid.push_messages(to_all(grid, weights(), "train")))
    time.sleep(0.1)
    assert len(list(grid.pull_messages(ids))) == 2


def test_an_app_that_answers_the_offer_itself_is_named(make_grid: GridMaker) -> None:
    app = counting_app()

    @app.query("resident_open")
    def answer(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    grid = make_grid(1, app=app)
    with pytest.raises(SessionError, match="node 1000: its app answered the offer"):
        grid.open()


@pytest.mark.parametrize("method", ["push_messages", "pull_messages"])
def test_nodes_can_be_opened_after_the_wrapped_grid_failed(
    make_grid: GridMaker, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    grid = make_grid(2)

    def fail(_: object) -> list[str]:
        raise ConnectionError("no SuperLink")

    with monkeypatch.context() as patch:
        patch.setattr(plain_of(grid), method, fail)
        with pytest.raises(ConnectionError):
            grid.open()
    replies = grid.send_and_receive(to_all(grid, weights(), "train"), timeout=5)
    assert [reply.has_content() for reply in replies] == [True, True]


def test_a_node_that_ends_its_session_is_an_error_until_it_is_opened_again(
    make_grid: GridMaker, detached: bool
) -> None:
    limits = Limits(idle=0.4, silence=20.0)
    grid = make_grid(1, limits=limits, detached=detached)
    [node] = grid.open()
    time.sleep(0.7)
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"))
    assert "no message for" in str(reply.error.reason)
    assert str(node) in str(reply.error.reason)
    assert grid.open() == [node]
    [reply] = grid.send_and_receive(to_all(grid, weights(), "train"))
    assert reply.has_content()


def test_a_long_call_is_not_idle(make_grid: GridMaker) -> None:
    # Nor is the second node, whose message waits for the first in one process.
    grid = make_grid(2, limits=Limits(idle=0.3))
    replies = grid.send_and_receive(to_all(grid, sleep_record(0.4), "query.slow"))
    assert [reply.has_content() for reply in replies] == [True, True]


def test_closing_twice_and_opening_again(make_grid: GridMaker) -> None:
    with make_grid(2) as grid:
        grid.open()
    grid.close()
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert [reply.has_content() for reply in replies] == [True, True]


def test_a_reply_in_the_name_of_another_node_is_refused(make_grid: GridMaker) -> None:
    app = counting_app()

    @app.query("forge")
    def forge(message: Message, context: Context) -> Message:
        reply = Message(RecordDict(), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1001
        return reply

    grid = make_grid(2, app=resident(app))
    [reply] = grid.send_and_receive([Message(RecordDict(), 1000, "query.forge")])
    assert reply.metadata.src_node_id == 1000
    assert "bad reply" in str(reply.error.reason)


def test_settings_that_cannot_work_are_refused() -> None:
    plain = PlainGrid(counting_app(), 1)
    for options, words in (
        ({"address": "0.0.0.0:0", "advertise": "example.org"}, "refusing plaintext"),
        ({"address": "192.0.2.1:5000"}, "refusing plaintext"),
        ({"address": "0.0.0.0:0", "insecure": True}, "advertise"),
        ({"address": "127.0.0.1:99999"}, "host:port"),
        ({"certificate": b"x"}, "go together"),
        ({"wire_dtype": "int8"}, "float16"),
        ({"on_missing": "zeros"}, "plain"),
    ):
        with pytest.raises(ConfigError, match=words):
            ResidentGrid(plain, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="silence"):
        Limits(silence=0)


def test_a_port_that_is_taken_is_refused_and_not_shared(make_grid: GridMaker) -> None:
    first = make_grid(1)
    first.open()
    offer = plain_of(first).sent[0].content.config_records[OPEN_RECORD]
    second = make_grid(1, address=str(offer["address"]))
    with pytest.raises(ConfigError, match="cannot listen"):
        second.open()
