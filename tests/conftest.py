"""One torch thread: small models are slower with more, and sums would depend on it."""

from __future__ import annotations

import gc
import logging
import os

import flwr.supercore  # noqa: F401 (it sets up the log)
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# No test cuts the power: what a killed process has written is there without it, and
# the disk takes several milliseconds for each of thousands of files.
os.fsync = lambda fd: None
gc.disable()  # until all tests are collected: what is imported stays

# The same examples in every run, also on a busy machine.
settings.register_profile("suite", max_examples=50, deadline=None, derandomize=True)
settings.load_profile("suite")

LOG = logging.getLogger("flwr")
LEVEL = LOG.level


@pytest.fixture(autouse=True)
def _log_level() -> None:
    """Give Flower's log its level back: commands of other tests keep it quiet."""
    LOG.setLevel(LEVEL)
    LOG.disabled = False
    logging.disable(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run what starts Flower, one test after the other.

    Two of those at once would wait for each other's start on a small machine. They come
    first. Meanwhile the other worker does what is slow, then what shares a fixture,
    which would be made again by each worker, and at last what stands alone.
    """
    order: dict[pytest.Item, tuple[bool, ...]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        group = "flower" if "flower" in marks else _shared_fixture(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        order[item] = (group != "flower", "slow" not in marks, group is None)
    items.sort(key=order.__getitem__)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the garbage collector what was imported; it stays until the end."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    grouped = [item for item in session.items if "xdist_group" in item.keywords]
    if session.config.getoption("loadgroup", False) and grouped:
        # Without groups both workers make every shared fixture, and nothing says so.
        assert all("@" in item.nodeid for item in grouped), "pytest-xdist lost groups"


def _shared_fixture(item: pytest.Item) -> str | None:
    """Return the place of a fixture of ours that several tests share, if any."""
    known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    for definitions in known.values():
        fixture = definitions[-1]
        if fixture.scope == "session" and fixture.baseid:
            return str(fixture.baseid)
        if fixture.scope == "module" and fixture.baseid:
            return item.nodeid.partition("::")[0]
    return None
