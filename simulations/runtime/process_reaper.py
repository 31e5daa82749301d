"""End every process of some Unix sessions, even if the process that started them died.

A process stays in the session of its ancestors unless it starts a new one. A session
therefore includes orphans, which a process tree does not.

This file is also a program. It reads session ids from its standard input, one per line.
When the input ends, for whatever reason, it ends these sessions and deletes the folder
given as its argument. It uses only the standard library.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.02  # seconds between two checks of the processes


class ProcessReaper:
    """A process that ends sessions when told to, or when the calling process ends."""

    def __init__(self, folder: Path) -> None:
        self._sessions: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # out of reach of a Ctrl-C at the terminal
        )

    def watch(self, session: int) -> None:
        """Add a session, given by the id of its leader."""
        self._sessions.add(session)
        if self._process.stdin is not None:
            self._process.stdin.write(f"{session}\n")
            self._process.stdin.flush()

    def end(self) -> set[int]:
        """End the sessions and return the processes that could not be ended."""
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=4 * GRACE)
        return end_sessions(self._sessions)  # in case the reaper was killed


def end_sessions(sessions: Iterable[int], grace: float = GRACE) -> set[int]:
    """End sessions with SIGTERM, then SIGKILL; return the processes left."""
    sessions = set(sessions)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for pid in session_members(sessions):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal_number)
        patience = time.monotonic() + grace
        while left := session_members(sessions):
            if time.monotonic() > patience:
                break
            time.sleep(_POLL)
    return left


def session_members(sessions: set[int]) -> set[int]:
    """Return the processes of some sessions, without zombies."""
    members = set()
    for pid, state in _process_table():
        with suppress(ProcessLookupError, PermissionError):
            if state != "Z" and os.getsid(pid) in sessions:
                members.add(pid)
    return members


def _process_table() -> Iterator[tuple[int, str]]:
    """Yield the id and the state letter of every process."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        command = ["ps", "-A", "-o", "pid=,stat="]
        table = subprocess.run(command, capture_output=True, text=True, check=True)
        for row in table.stdout.splitlines():
            pid, state = row.split()[:2]
            yield int(pid), state[0]
        return
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):
                # The name stands in brackets and may itself contain brackets.
                stat = (entry / "stat").read_text(errors="replace")
                yield int(entry.name), stat.rpartition(")")[2].split()[0]


if __name__ == "__main__":
    end_sessions([int(line) for line in sys.stdin])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
