"""Flower messages over open streams to nodes that stay in memory for a whole run.

`ResidentGrid` wraps any Flower grid and `resident` wraps any ClientApp. One ordinary
Flower message per node opens a session. Later messages travel over a stream that the
node opens: of gRPC, or on one machine over a Unix socket. Nothing in this package
depends on the content of the messages.
"""

from .grid import ResidentGrid
from .session import resident
from .settings import Limits, SessionError

__all__ = ["Limits", "ResidentGrid", "SessionError", "resident"]
