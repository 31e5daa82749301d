"""One torch thread: small models are slower with more, and sums would depend on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Give Flower's log the level back that it had: commands keep it quiet."""
    log = logging.getLogger("flwr")
    before = log.level
    yield
    log.setLevel(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run what starts many processes, one after the other.

    Two of those at once would wait for each other's start on a small machine. They come
    first; meanwhile the other worker does the rest.
    """

    def heavy(item: pytest.Item) -> bool:
        return any(mark.name in ("flower", "slow") for mark in item.iter_markers())

    for item in items:
        if heavy(item):
            item.add_marker(pytest.mark.xdist_group("heavy"))
    items.sort(key=heavy, reverse=True)
