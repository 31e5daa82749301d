"""The grid in one process: its messages, and how long its parties live."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from vertical_cases import make_label, make_passive, rich_app

from flower_vfl import ConfigError, InProcessGrid, PassiveParty, vertical_client_app
from flower_vfl.protocol.replay import sessions
from flower_vfl.strategies import VerticalStrategy


def test_messages_can_be_pushed_and_pulled() -> None:
    app = vertical_client_app(make_passive, make_label)
    with InProcessGrid(app, 3) as grid:
        content = RecordDict({"c": ConfigRecord({"a": 1})})
        sent = [
            grid.create_message(content, "query.vfl_hello", node, "1")
            for node in grid.get_node_ids()
        ]
        ids = list(grid.push_messages(sent))
        assert len(set(ids)) == 3
        assert [m.metadata.message_id for m in sent] == ids
        replies = list(grid.pull_messages([ids[2], "unknown", ids[0]]))
        assert [r.metadata.src_node_id for r in replies] == [3, 1]
        assert [r.metadata.reply_to_message_id for r in replies] == [ids[2], ids[0]]
        assert list(grid.pull_messages(ids[:1])) == []  # only once
        assert len(list(grid.pull_messages(ids))) == 1


def test_a_node_that_does_not_exist() -> None:
    grid = InProcessGrid(rich_app(), 2)
    with pytest.raises(ConfigError, match=r"no node 9; nodes: \[1, 2\]"):
        grid.send_and_receive([Message(RecordDict(), 9, "query.vfl_hello")])
    with pytest.raises(ConfigError, match="make a new grid"):
        grid.set_run(grid.run)


def test_close_frees_the_parties() -> None:
    made: list[weakref.ref[Any]] = []

    def passive(context: Context) -> PassiveParty:
        party = make_passive(context)
        made.append(weakref.ref(party))
        return party

    grid = InProcessGrid(vertical_client_app(passive, make_label), 3)
    VerticalStrategy(batch_size=16).start(grid, num_rounds=1)
    assert len(grid.parties()) == 3
    grid.close()
    gc.collect()
    assert [ref() for ref in made] == [None, None]
    assert grid.parties() == {}
    grid.close()  # twice is once


def test_a_grid_that_is_dropped_frees_its_parties() -> None:
    grid = InProcessGrid(rich_app(), 3)
    run_id = grid.run.run_id
    VerticalStrategy(batch_size=16).connect(grid)
    assert (run_id, 1) in sessions
    del grid
    gc.collect()
    assert (run_id, 1) not in sessions


def test_data_is_loaded_once_per_node() -> None:
    calls: list[int] = []

    def passive(context: Context) -> PassiveParty:
        calls.append(int(context.node_config["partition-id"]))
        return make_passive(context)

    grid = InProcessGrid(vertical_client_app(passive, make_label), 4)
    VerticalStrategy(batch_size=16).start(grid, num_rounds=2)
    assert calls == [1, 2, 3]
