"""Memory of this process and of its descendants."""

from __future__ import annotations

import importlib.util
import threading

from flower_vfl.errors import ConfigError

_EVERY = 0.25  # seconds between two samples


def can_watch_memory() -> bool:
    """Return whether psutil is installed."""
    return importlib.util.find_spec("psutil") is not None


class MemoryWatch:
    """Samples the memory of this process and its descendants and keeps the peak."""

    def __init__(self) -> None:
        if not can_watch_memory():
            raise ConfigError("memory is measured with psutil: pip install psutil")
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        """Start sampling."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        import psutil  # type: ignore[import-untyped]  # it is optional

        own = psutil.Process()
        while True:
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue  # it has just ended
            self.peak = max(self.peak, total)
            if self._done.wait(_EVERY):
                return
