"""Fixtures of the tests of defended grids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flwr.app import Context, Message, RecordDict

from flower_vfl import InProcessGrid


@pytest.fixture
def arrived() -> list[Message]:
    """Return the messages that have arrived at the parties."""
    return []


@pytest.fixture
def inner(arrived: list[Message]) -> Iterator[InProcessGrid]:
    """Return a grid of three parties that keep what arrives and answer nothing."""

    def client(message: Message, context: Context) -> Message:
        arrived.append(message)
        return Message(RecordDict(), reply_to=message)

    with InProcessGrid(client, 3) as grid:  # type: ignore[arg-type]
        yield grid
