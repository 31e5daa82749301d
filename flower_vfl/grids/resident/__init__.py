"""Flower messages at network speed: parties that stay in memory for a whole run.

`ResidentGrid` wraps any Flower grid and `resident` wraps any ClientApp. One ordinary
Flower message per node opens a session; every later message travels over a gRPC
stream that the node dials out to. Nothing in here knows what the messages mean.
"""

from __future__ import annotations

from .app import resident
from .grid import ResidentGrid
from .settings import Limits, SessionError

__all__ = ["Limits", "ResidentGrid", "SessionError", "resident"]
