from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flower_vfl.simulations.runtime.process_reaper import (
    ProcessReaper,
    end_sessions,
    session_members,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Unix sessions")


def orphan_maker(
    tmp_path: Path, name: str = "pid"
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a session whose leader ends at once and leaves a process behind."""
    note = tmp_path / name
    leader = subprocess.Popen(
        ["sh", "-c", f"sleep 300 & echo $! > {note}"], start_new_session=True
    )
    leader.wait()
    return leader, int(note.read_text())


def alive(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return state != "" and not state.startswith("Z")


def wait_for_end(pid: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


def test_an_orphan_is_found_and_ended(tmp_path: Path) -> None:
    leader, orphan = orphan_maker(tmp_path)
    assert session_members({leader.pid}) == {orphan}
    assert end_sessions({leader.pid}) == set()
    assert not alive(orphan)


def test_a_process_that_ignores_the_polite_signal_is_ended(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = subprocess.Popen(
        ["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"],
        start_new_session=True,
    )
    while not ready.exists():
        time.sleep(0.01)
    assert end_sessions({stubborn.pid}, grace=0.5) == set()
    assert stubborn.wait() == -signal.SIGKILL


def test_other_sessions_are_left_alone(tmp_path: Path) -> None:
    leader, orphan = orphan_maker(tmp_path, "one")
    other_leader, other = orphan_maker(tmp_path, "other")
    end_sessions({leader.pid})
    assert not alive(orphan)
    assert alive(other)
    end_sessions({other_leader.pid})


def test_the_reaper_ends_sessions_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    reaper = ProcessReaper(folder)
    leader, orphan = orphan_maker(tmp_path)
    reaper.watch(leader.pid)
    assert reaper.end() == set()
    assert not alive(orphan)
    assert not folder.exists()


def test_the_reaper_acts_when_its_caller_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    leader, orphan = orphan_maker(tmp_path)
    script = (
        "import time\nfrom pathlib import Path\n"
        "from flower_vfl.simulations.runtime.process_reaper import ProcessReaper\n"
        f"reaper = ProcessReaper(Path({str(folder)!r}))\n"
        f"reaper.watch({leader.pid})\nprint(flush=True)\ntime.sleep(300)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    caller.stdout.readline()
    assert alive(orphan)
    caller.kill()
    caller.communicate()
    wait_for_end(orphan)
