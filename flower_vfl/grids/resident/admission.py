"""Connections that are not authenticated yet, and those that were refused."""

import asyncio
import time
from collections import Counter
from logging import WARNING
from typing import Final

from flwr.supercore import log

_INTERVAL: Final = 10.0
_LINES: Final = 20  # most refusals that are logged one by one in an interval


class WaitingStreams:
    """The streams that are not authenticated yet, in order of arrival.

    When there are too many, the oldest stream of the largest group is timed out. The
    streams of one host that name the same node are a group, so a stranger who opens
    many streams displaces itself.
    """

    def __init__(self) -> None:
        self._groups: dict[asyncio.Timeout, tuple[str, int | None]] = {}

    def add(self, timeout: asyncio.Timeout, peer: str, limit: int) -> None:
        """Add a stream by its timeout, after making room for it."""
        while len(self._groups) >= limit:
            [(largest, _)] = Counter(self._groups.values()).most_common(1)
            oldest = next(t for t, group in self._groups.items() if group == largest)
            del self._groups[oldest]
            if not oldest.expired():
                oldest.reschedule(0.0)
        self._groups[timeout] = (peer.rpartition(":")[0], None)

    def name(self, timeout: asyncio.Timeout, node_id: int) -> None:
        """Note that a stream names a node that is expected to connect."""
        if timeout in self._groups:
            self._groups[timeout] = (self._groups[timeout][0], node_id)

    def remove(self, timeout: asyncio.Timeout) -> bool:
        """Forget a stream; return whether it still had its place."""
        return self._groups.pop(timeout, None) is not None


class RefusalLog:
    """Logs refused connections, and only counts them when there are too many."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._count = 0

    def add(self, peer: str, problem: object) -> None:
        """Log one refusal, or count it."""
        self.flush()
        self._count += 1
        if self._count <= _LINES:
            log(WARNING, "Session refused: peer %s: %s", peer, problem)

    def flush(self) -> None:
        """Log how many refusals were only counted, once an interval."""
        if time.monotonic() - self._start < _INTERVAL:
            return
        if self._count > _LINES:
            text = "Session refused: %s more connections in the last %g s"
            log(WARNING, text, self._count - _LINES, _INTERVAL)
        self._start, self._count = time.monotonic(), 0
