"""The mark on the context of a node that stays in memory."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from resident_cases import GridMaker, PlainGrid, to_all

from flower_vfl import InProcessGrid
from flower_vfl.grids.resident import resident
from flower_vfl.grids.resident.session import ResidentContext
from flower_vfl.protocol.residence import RESIDENT


class ContextApp:
    """An app that keeps the contexts it is called with and counts in their state."""

    def __init__(self, replace_state: bool = False) -> None:
        self.contexts: list[Context] = []
        self.app = ClientApp()

        @self.app.query()
        def query(message: Message, context: Context) -> Message:
            self.contexts.append(context)
            count = len(context.state) and int(context.state["count"]["n"])
            record = ConfigRecord({"n": count + 1})
            if replace_state:
                context.state = RecordDict({"count": record})
            else:
                context.state["count"] = record
            marked = ConfigRecord({"resident": RESIDENT in context.__dict__})
            return Message(RecordDict({"r": marked, "count": record}), reply_to=message)


def ask(grid: PlainGrid | InProcessGrid) -> tuple[bool, int]:
    """Return whether the node is marked and how many messages it counts."""
    [reply] = grid.send_and_receive(to_all(grid, RecordDict(), "query"))
    content = reply.content.config_records
    return bool(content["r"]["resident"]), int(content["count"]["n"])


@pytest.mark.parametrize("replace_state", [False, True])
def test_the_mark_ends_with_the_session(
    make_grid: GridMaker, detached: bool, replace_state: bool
) -> None:
    app = ContextApp(replace_state)
    grid = make_grid(1, app=resident(app.app), detached=detached)
    plain = grid._grid
    assert ask(plain) == (False, 1)
    assert ask(grid) == (True, 2)
    assert ask(grid) == (True, 3)
    assert app.contexts[1] is app.contexts[2]
    # Flower's own context, which Ray pickles with the reply, is never marked.
    assert RESIDENT not in app.contexts[0].__dict__
    grid.close()
    # The node goes on over the plain grid. Only a blocking session that ends hands
    # back a state that the app has replaced.
    kept = not (detached and replace_state)
    assert ask(plain) == (False, 4 if kept else 2)


def test_a_session_that_ends_late_does_not_unmark_its_successor(
    make_grid: GridMaker,
) -> None:
    app = ContextApp()
    started, finish = threading.Event(), threading.Event()

    @app.app.query("block")
    def block(message: Message, context: Context) -> Message:
        started.set()
        finish.wait(10)
        return Message(RecordDict(), reply_to=message)

    grid = make_grid(1, app=resident(app.app), detached=False)
    grid.push_messages(to_all(grid, RecordDict(), "query.block"))
    started.wait(10)
    grid._close_timeout = 0.0
    grid.close()
    assert ask(grid) == (True, 1)  # a new session, while the old one still works
    finish.set()
    assert ask(grid) == (True, 2)


def test_copies_of_the_context_are_not_marked() -> None:
    state = RecordDict({"r": ConfigRecord({"x": 1})})
    original = Context(1, 2, {"a": 3}, state, {"b": 4})
    context = ResidentContext(original)
    assert RESIDENT in context.__dict__ and RESIDENT not in original.__dict__
    assert context.state is original.state
    for other in (
        copy.copy(context),
        copy.deepcopy(context),
        pickle.loads(pickle.dumps(context)),
        context_from_proto(context_to_proto(context)),
    ):
        assert type(other) is Context and RESIDENT not in other.__dict__
        assert other == original


def test_nodes_of_an_in_process_grid_are_marked() -> None:
    with InProcessGrid(ContextApp().app, 1) as grid:
        assert ask(grid) == (True, 1)


def test_sessions_around_an_in_process_grid(make_grid: GridMaker) -> None:
    app = ContextApp()
    grid = make_grid(1, app=resident(app.app))
    with InProcessGrid(resident(app.app), 1) as inner:
        grid._grid = inner
        assert ask(grid) == (True, 1)
        grid.close()
        assert ask(inner) == (True, 2)
