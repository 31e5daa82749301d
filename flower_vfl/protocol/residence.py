"""Who is kept in memory between two messages.

A runtime that keeps a party's process and `Context` alive from one message to the
next marks the party here, and the party's app may then leave its state in memory
instead of writing it into ``context.state`` at every message.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock

RESIDENT = "flower_vfl_resident"
"""Key in ``context.__dict__`` of a node whose runtime keeps it in memory."""

# Counted, so that a session that ends late does not unmark the one that took over.
_marked: Counter[tuple[int, int]] = Counter()
_lock = Lock()


def mark(run_id: int, node_id: int) -> None:
    """Say that the node stays in this process until `unmark` is called as often."""
    with _lock:
        _marked[run_id, node_id] += 1


def unmark(run_id: int, node_id: int) -> None:
    """Take one `mark` back; nothing happens if there is none."""
    with _lock:
        _marked[run_id, node_id] -= 1
        if _marked[run_id, node_id] <= 0:
            del _marked[run_id, node_id]


def is_resident(run_id: int, node_id: int) -> bool:
    """Return whether the node is kept in this process between messages."""
    with _lock:
        return (run_id, node_id) in _marked
