"""Memory of this process and of all that it started."""

from __future__ import annotations

import importlib.util
import threading
from types import TracebackType

from flower_vfl.errors import ConfigError

_EVERY = 0.25  # seconds between two looks


def can_watch_memory() -> bool:
    """Return whether psutil is there, which looks at processes."""
    return importlib.util.find_spec("psutil") is not None


class MemoryWatch:
    """Keeps the largest memory that this process and its descendants had together.

    Memory that processes share, such as libraries, does not count.
    """

    def __init__(self) -> None:
        if not can_watch_memory():
            raise ConfigError("memory is measured with psutil: pip install psutil")
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look for the last time."""
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        import psutil  # type: ignore[import-untyped]  # it is optional

        own = psutil.Process()
        while True:
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue  # it ended between the two looks
            self.peak = max(self.peak, total)
            if self._done.wait(_EVERY):
                return
