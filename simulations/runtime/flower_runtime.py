"""The processes of one private Flower runtime: servers, commands and their children."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from flower_vfl.errors import VerticalError

from .process_reaper import Watchman

CONNECTION = "flower-vfl"  # name of the SuperLink in Flower's configuration
LAST_LINES = 30  # lines of a log that an error repeats
_POLL = 0.05  # seconds between two looks at a process or an address
_SERVER_START = 60.0  # seconds that the SuperLink may take to answer
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Deadline:
    """The time by which a run must have ended, if there is one."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._start = time.monotonic()

    def remaining(self) -> float | None:
        """Return the seconds that are left, at least zero."""
        if self._timeout is None:
            return None
        return max(0.0, self._start + self._timeout - time.monotonic())

    def check(self) -> None:
        """Raise if no time is left."""
        if self.remaining() == 0.0:
            raise self.error()

    def error(self) -> VerticalError:
        """Return the error that says so."""
        return VerticalError(
            f"the Flower run did not end within {self._timeout} s and was stopped; "
            "give it more time, or look at its log for what it waits for"
        )


class Runtime:
    """The processes of one run: the servers, the commands, and all their children."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._home = home
        self._environment = _environment(home, folder)
        self._processes: list[subprocess.Popen[str]] = []
        self._servers: dict[str, subprocess.Popen[str]] = {}
        self._watchman = Watchman(folder)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self,
        command: Sequence[str],
        output: IO[str] | int = subprocess.PIPE,
        errors: int = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start one of Flower's commands as the leader of a session of its own."""
        path = shutil.which(command[0], path=self._environment["PATH"])
        if path is None:
            raise VerticalError(
                f"the command '{command[0]}' is missing: install flwr[simulation] into "
                f"the environment of {sys.executable}"
            )
        process = subprocess.Popen(
            [path, *command[1:]],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._watchman.watch(process.pid)
        self._processes.append(process)
        return process

    def start_servers(self, port: int, deadline: Deadline) -> None:
        """Start SuperLink and SuperExec together and wait until the first answers."""
        # Without TLS, because nothing leaves the loopback device.
        servers = {
            "flower-superlink": "--insecure --simulation --isolation process "
            f"--host 127.0.0.1 --port {port}",
            "flower-superexec": f"--insecure --runtime-api-address 127.0.0.1:{port}",
        }
        for name, options in servers.items():
            with (self._home / f"{name}.log").open("w") as log:
                self._servers[name] = self.start([name, *options.split()], log)
        patience = time.monotonic() + _SERVER_START
        while not _answers(port):
            self.check_servers()
            deadline.check()
            if time.monotonic() > patience:
                raise VerticalError(
                    f"the SuperLink did not answer within {_SERVER_START:.0f} s:\n"
                    + self._log("flower-superlink")
                )
            time.sleep(_POLL)
        self.check_servers()  # the answer came from this SuperLink, not from another

    def check_servers(self) -> None:
        """Raise if a server has ended."""
        for command, server in self._servers.items():
            if server.poll() is not None:
                raise VerticalError(
                    f"{command} ended with code {server.returncode}:\n"
                    + self._log(command)
                )

    def lines(
        self, command: subprocess.Popen[str], deadline: Deadline
    ) -> Iterator[str]:
        """Yield what a command prints; raise if a server ends, or at the deadline."""
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            with suppress(ValueError, OSError):  # closed by stop()
                for line in command.stdout or ():
                    lines.put(plain(line).rstrip())
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=0.2)
            except queue.Empty:
                self.check_servers()
            else:
                if line is None:
                    return
                yield line
            deadline.check()

    def list_runs(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Return what the SuperLink says about its runs."""
        command = ["flwr", "list", CONNECTION, "--format", "json"]
        process = self.start(command, errors=subprocess.PIPE)
        try:
            answer, complaint = process.communicate(timeout=deadline.remaining())
            runs: list[dict[str, Any]] = json.loads(answer)["runs"]
        except subprocess.TimeoutExpired:
            raise deadline.error() from None
        except (ValueError, KeyError, TypeError) as error:
            raise VerticalError(
                f"flwr list did not say how the run ended:\n{answer}{complaint}"
            ) from error
        return runs

    def stop(self) -> None:
        """End every process of the run; return when none is left."""
        left = self._watchman.end()
        for process in self._processes:
            process.poll()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if left:
            raise VerticalError(
                f"could not end the processes {sorted(left)} of the run"
            )

    def _log(self, command: str) -> str:
        text = (self._home / f"{command}.log").read_text(errors="replace")
        return "\n".join(plain(text).splitlines()[-LAST_LINES:])


def plain(text: str) -> str:
    """Return a text without the codes that colour a terminal."""
    return _COLOUR.sub("", text)


def free_port() -> int:
    """Return a loopback port that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _environment(home: Path, folder: Path) -> dict[str, str]:
    """Return the environment that keeps a runtime to itself."""
    env = dict(os.environ)
    scripts = sysconfig.get_path("scripts")
    env["PATH"] = os.pathsep.join([scripts, env.get("PATH", os.defpath)])
    env["FLWR_HOME"] = str(home)
    env["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = str(_POLL)
    env["RAY_TMPDIR"] = str(folder)
    env["RAY_ADDRESS"] = "local"
    env["PYTHONUNBUFFERED"] = "1"
    env["COLUMNS"] = "200"
    env.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1", "localhost"]))
    return env
