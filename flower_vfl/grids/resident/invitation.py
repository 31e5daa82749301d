"""What an invitation to a session needs to know, and what its answer says."""

from __future__ import annotations

from flwr.app import Message
from flwr.serverapp import Grid

from .settings import OPEN_RECORD


def is_simulation(grid: Grid) -> bool:
    """Return whether the process of a node outlives a message."""
    # By name: the class is not public, and importing it would load the SuperLink.
    in_memory = {"InMemoryGrid", "InProcessGrid"}
    return any(kind.__name__ in in_memory for kind in type(grid).__mro__)


def problem_of(reply: Message) -> str | None:
    """Return what an answer to an invitation says went wrong; None if nothing did."""
    if reply.has_error():
        return reply.error.reason or f"error {reply.error.code}"
    report = reply.content.config_records[OPEN_RECORD]
    return None if report["state"] == "detached" else str(report.get("reason"))
