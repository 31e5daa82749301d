"""Where a run is, and a Ctrl-C that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


@dataclass
class RunState:
    """Where a run is and what it has measured; kept with every checkpoint.

    Parameters
    ----------
    step : int (default: 0)
        Completed training steps.
    sums : dict[str, float] (default: {})
        Loss and other metrics of the steps of the current epoch, each times its rows.
    rows, seconds : float (default: 0.0)
        Of the steps of the current epoch.
    train, evaluate : dict[int, dict[str, float]] (default: {})
        Metrics by epoch.
    best : float | None (default: None)
        Best validation metric so far.
    stale : int (default: 0)
        Evaluations since then.
    stopped : bool (default: False)
        Whether early stopping has ended the run.
    """

    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    rows: float = 0.0
    seconds: float = 0.0
    train: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluate: dict[int, dict[str, float]] = field(default_factory=dict)
    best: float | None = None
    stale: int = 0
    stopped: bool = False


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that a run ends between two steps."""
    hit = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield hit.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        if hit.is_set():
            raise KeyboardInterrupt
        hit.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield hit.is_set
    finally:
        signal.signal(signal.SIGINT, before)
