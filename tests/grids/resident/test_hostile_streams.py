"""Strangers that open many streams, beside nodes that must find room.

`benchmarks/hostile_streams.py` does the same with 200 streams from another process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
from hostile_cases import CutGrid, HostileStreams, train
from resident_cases import GridMaker
from vertical_cases import assert_equal

from flower_vfl.grids.resident import Limits, SessionError, admission
from flower_vfl.grids.resident.admission import RefusalLog, WaitingStreams
from flower_vfl.grids.resident.authentication import RefusedError
from flower_vfl.grids.resident.event_loop import SendQueue
from flower_vfl.grids.resident.wire import LAST

Attack = Callable[..., HostileStreams]


@pytest.fixture
def attack() -> Iterator[Attack]:
    """Return a function that starts hostile streams and waits until all have tried."""
    started: list[HostileStreams] = []

    def start(grid: CutGrid, count: int, **options: object) -> HostileStreams:
        hostile = HostileStreams(grid.listen(), count, **options)  # type: ignore[arg-type]
        started.append(hostile)
        end = time.monotonic() + 60
        while sum(hostile.opened.values()) <= count and time.monotonic() < end:
            time.sleep(0.01)
        return hostile

    yield start
    for hostile in started:
        hostile.stop()


def refuse_the_newest(
    self: WaitingStreams, timeout: asyncio.Timeout, peer: str, limit: int
) -> None:
    """Do what the first version did when it had too many unauthenticated streams."""
    if len(self._groups) >= limit:
        raise RefusedError("too many unauthenticated connections", retry=True)
    self._groups[timeout] = (peer, None)


def join(attack: Attack, timeout: float) -> int:
    """Return how many of three nodes join beside 40 silent streams."""
    grid = CutGrid(parties=3, cut_every=1000, limits=Limits(pending=16))
    hostile = attack(grid, 40, kinds=["silent"])
    try:
        return len(grid.open(timeout=timeout))
    except SessionError:
        return 0
    finally:
        grid.close()
        hostile.stop()


@pytest.mark.parametrize(
    "old",
    [
        pytest.param(True, marks=pytest.mark.extra, id="refuse newest"),
        pytest.param(False, id="drop oldest"),
    ],
)
def test_forty_silent_streams(
    attack: Attack, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not old:
        assert join(attack, timeout=20.0) == 3
        return
    monkeypatch.setattr(WaitingStreams, "add", refuse_the_newest)
    # A node that dials before the strangers do gets in, on a busy machine.
    assert any(join(attack, timeout=2.0) < 3 for _ in range(5))


def test_a_run_that_starts_reconnects_and_ends(attack: Attack) -> None:
    expected = train(CutGrid(parties=3, cut_every=1000))
    grid = CutGrid(parties=3, cut_every=6, limits=Limits(pending=16))
    known = {"run_id": grid.run.run_id, "nodes": list(grid.get_node_ids())}
    hostile = attack(grid, 40, **known)
    found = train(grid)
    assert len(grid.joined) > 2
    assert max(grid.joined) < 20.0  # benchmarks/hostile_streams.py prints the seconds
    assert hostile.admitted == 0
    assert_equal(found, expected)


def lost_places(hosts: str, named: str = "") -> list[int]:
    """Return which streams lose one of three places, opened from hosts in order."""
    streams, lost = WaitingStreams(), []
    for number, host in enumerate(hosts):
        timeout = Mock(spec=asyncio.Timeout)
        timeout.expired.return_value = False
        timeout.reschedule.side_effect = lambda _, number=number: lost.append(number)
        streams.add(timeout, f"ipv4:{host}:7", 3)
        if str(number) in named:
            streams.name(timeout, 5)
    return lost


def test_the_oldest_of_the_largest_group_loses_its_place() -> None:
    assert lost_places("aaa") == []
    assert lost_places("aaaaa") == [0, 1]
    assert lost_places("abcde") == [0, 1]
    assert lost_places("baaaaa") == [1, 2, 3]
    assert lost_places("aaaaa", named="0") == [1, 2]
    assert lost_places("aaaaa", named="01") == [0, 2]


class SlowRefusal:
    """A stream that sends garbage, and whose refusal takes until it is let go."""

    def __init__(self, gone: asyncio.Event) -> None:
        self._gone = gone

    async def read(self) -> bytes:
        return LAST + b"garbage"

    async def abort(self, code: object, _: str) -> None:
        await self._gone.wait()
        raise ConnectionAbortedError


def test_a_stream_that_is_being_refused_has_no_place(
    make_grid: GridMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one cannot have it, and was refused for that."""
    server = make_grid(1, limits=Limits(pending=1))._get_server()

    async def two() -> None:
        gone = asyncio.Event()
        peers = [SendQueue(f"unix:{number}") for number in range(2)]
        tasks = [server._authenticate(SlowRefusal(gone), peer) for peer in peers]
        both = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        gone.set()
        await both

    asyncio.run(two())
    refused = [record.getMessage() for record in caplog.records]
    assert len(refused) == 2 and all("malformed hello" in line for line in refused)


def test_refusals_are_logged_at_a_limited_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    monkeypatch.setattr(admission, "_LINES", 3)
    refusals = RefusalLog()
    for number in range(10):
        refusals.add(f"peer {number}", "garbage")
    assert len(caplog.records) == 3
    refusals._start -= admission._INTERVAL
    refusals.flush()
    refusals.flush()
    assert len(caplog.records) == 4
    assert "7 more connections" in caplog.records[-1].getMessage()
    refusals.add("peer", "garbage")
    assert len(caplog.records) == 5
