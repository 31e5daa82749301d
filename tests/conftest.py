"""One torch thread: small models are slower with more, and sums would depend on it."""

from __future__ import annotations

import logging

import flwr.supercore  # noqa: F401 (it sets up the log)
import pytest
import torch

torch.set_num_threads(1)


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
