"""Run a Flower app with ``flwr run`` on a private SuperLink, and clean up afterwards.

``flwr run`` on its own starts one SuperLink per machine on a fixed port and leaves it
running. :func:`run_app` starts a SuperLink and a SuperExec on a free loopback port,
submits the app with ``flwr run --stream``, asks ``flwr list`` how the run ended, and
stops every process that it started:

- ``FLWR_HOME`` is a private folder, so that neither the user's Flower configuration
  nor another run is touched; ``RAY_TMPDIR`` and ``RAY_ADDRESS=local`` do this for Ray;
- :class:`Runtime` starts the SuperExec itself, so its process id is known. The app
  process, Ray and Ray's workers stay in its Unix session, even when their parent dies;
- the SuperExec may not install dependencies: the app runs in the environment of the
  caller and needs no network;
- a :class:`~.process_reaper.ProcessReaper` ends the processes if the caller is killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import tomli_w
from flwr.common.config import flatten_dict

from flower_vfl.errors import ConfigError, VerticalError, check_name

from .process_reaper import ProcessReaper

if TYPE_CHECKING:
    from flower_vfl.simulations.deployment.cluster import ServerFiles

ConfigValue = str | int | float | bool

LOOPBACK = "127.0.0.1"
CONNECTION = "flower-vfl"  # name of the SuperLink in Flower's configuration
LAST_LINES = 30  # lines of a log that an error repeats
_POLL = 0.05  # seconds between two checks of a process or an address
_SERVER_START = 60.0  # seconds until the SuperLink must answer
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OWNER = "# Written by flower-vfl for one run.\n"
# Ray's sockets lie about 70 characters below its folder; a Unix socket's path has 103.
_LONGEST_TEMPORARY_FOLDER = 20
_FRAME = "╭╮╰╯─│ "


def run_app(
    app: Path,
    *,
    run_config: Mapping[str, ConfigValue],
    nodes: int,
    home: Path | None = None,
    timeout: float | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a Flower app in Flower's simulation runtime and wait for its end."""
    needs = "" if os.name == "posix" else "Linux or macOS, on Windows WSL2"
    if importlib.util.find_spec("ray") is None:
        needs = "Ray: pip install 'flower-vfl[sim]'"
    if needs:
        text = f"the Flower engine needs {needs}; or use the in-process engine"
        raise VerticalError(text)
    _check_settings(app, run_config)
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    federation += " client-resources-num-gpus=0.0"
    if nodes <= 2 * (os.cpu_count() or 1):  # an actor for each, so that all overlap
        federation += f" init-args-num-cpus={nodes}"
    deadline = Deadline(timeout)
    with ExitStack() as stack:
        folder = stack.enter_context(_temporary_folder())
        home = folder / "flwr" if home is None else home.resolve()
        port = free_port()
        _write_home(home, port, run_config)
        runtime = Runtime(home, folder)
        stack.callback(runtime.stop)
        runtime.start_servers(port, home)
        log: deque[str] = deque(maxlen=LAST_LINES)
        command = ["flwr", "run", str(app.resolve()), CONNECTION, "--stream"]
        command += ["--run-config", str(home / "run-config.toml")]
        command += ["--federation-config", federation]
        submit = runtime.start(command)
        for line in runtime.lines(submit, deadline):
            log.append(line)
            if on_line is not None:
                on_line(line)
        if submit.wait() != 0:
            said = "\n".join(filter(None, (line.strip(_FRAME) for line in log)))
            raise VerticalError(f"flwr run refused the app:\n{said}")
        _check_outcome(runtime.list_runs(deadline), log)


def _check_settings(app: Path, run_config: Mapping[str, ConfigValue]) -> None:
    """Refuse an unknown key by name; the SuperLink does not say which key it is."""
    pyproject = app / "pyproject.toml"
    if not pyproject.is_file():
        raise ConfigError(f"{app} is not a Flower app: it has no pyproject.toml")
    settings = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    for table in ("tool", "flwr", "app", "config"):
        settings = settings.get(table, {})
    known = flatten_dict(settings)
    for key in run_config:
        check_name(f"setting of the app '{app.name}'", key, known)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for Ray's sockets."""
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_TEMPORARY_FOLDER:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(
        prefix="vfl-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _write_home(home: Path, port: int, run_config: Mapping[str, ConfigValue]) -> None:
    connection = home / "config.toml"
    if connection.exists() and not connection.read_text().startswith(_OWNER):
        raise ConfigError(
            f"{home} holds a Flower configuration that flower-vfl did not write; "
            "give an empty folder"
        )
    write_connection(home, port)
    write_settings(home / "run-config.toml", run_config)


def write_connection(home: Path, port: int, authority: Path | None = None) -> None:
    """Write Flower's configuration of a SuperLink, over TLS with an authority."""
    home.mkdir(parents=True, exist_ok=True)
    safety = f'root-certificates = "{authority}"' if authority else "insecure = true"
    (home / "config.toml").write_text(
        f'{_OWNER}[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{LOOPBACK}:{port}"\n{safety}\n'
    )


def write_settings(path: Path, settings: Mapping[str, ConfigValue]) -> None:
    """Write settings as a TOML file."""
    path.write_text(tomli_w.dumps(dict(settings)), encoding="utf-8")


def _check_outcome(runs: list[dict[str, Any]], log: Sequence[str]) -> None:
    if len(runs) != 1:
        raise VerticalError(f"expected one run on the SuperLink, found {len(runs)}")
    status = runs[0]["status"]
    if status != "finished:completed":
        details = plain(runs[0]["status-details"])
        if "heartbeat" in details:
            details += " (its process was killed; did the machine run out of memory?)"
        raise VerticalError(
            f"the Flower run is {status}: {details}\n"
            "The last lines of its log:\n" + "\n".join(log)
        )


class Deadline:
    """The time by which a run must have ended, if any."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._start = time.monotonic()

    def remaining(self) -> float | None:
        """Return the seconds that are left; raise if there are none."""
        if self._timeout is None:
            return None
        left = self._start + self._timeout - time.monotonic()
        if left > 0.0:
            return left
        raise VerticalError(
            f"the Flower run did not end within {self._timeout} s and was stopped; "
            "raise the timeout, or see its log for what it waits for"
        )


class Runtime:
    """The processes of one run: servers, commands, and all their children."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._environment = _environment(home, folder)
        self._processes: list[subprocess.Popen[str]] = []
        self._servers: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, Path] = {}
        self._reaper = ProcessReaper(folder)

    def start(
        self,
        command: Sequence[str],
        output: IO[str] | int = subprocess.PIPE,
        errors: int = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start one of Flower's commands as the leader of a new Unix session."""
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
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._reaper.watch(process.pid)
        self._processes.append(process)
        return process

    def start_servers(
        self, port: int, logs: Path, tls: ServerFiles | None = None
    ) -> dict[str, subprocess.Popen[str]]:
        """Start the SuperLink and a SuperExec; wait until the SuperLink answers.

        Without TLS the SuperLink simulates the nodes; with TLS their keys are needed.
        """
        link, executor = ["--insecure", "--simulation"], ["--insecure"]
        if tls is not None:
            link = ["--ssl-ca-certfile", str(tls.authority), "--enable-supernode-auth"]
            link += ["--ssl-certfile", str(tls.certificate)]
            link += ["--ssl-keyfile", str(tls.key)]
            executor = ["--root-certificates", str(tls.authority)]
        # The SuperExec is started here, in a session that stop() ends.
        link += ["--isolation", "process", "--host", LOOPBACK, "--port", str(port)]
        executor += ["--runtime-api-address", f"{LOOPBACK}:{port}"]
        for name, options in (("superlink", link), ("superexec", executor)):
            self._logs[name] = logs / f"{name}.log"
            command = [f"flower-{name}", *options]
            self._servers[name] = self.start_logged(command, self._logs[name])
        patience = time.monotonic() + _SERVER_START
        while not answers(port, tls.authority if tls else None):
            self.check_servers()
            if time.monotonic() > patience:
                raise VerticalError(
                    f"the SuperLink did not answer within {_SERVER_START:.0f} s:\n"
                    + self._log("superlink")
                )
            time.sleep(_POLL)
        self.check_servers()  # the answer came from this SuperLink, not from another
        return self._servers

    def start_logged(self, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
        """Start a command whose output is appended to a log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            return self.start(command, file)

    def check_servers(self) -> None:
        """Raise if a server has ended."""
        for name, server in self._servers.items():
            if server.poll() is not None:
                raise VerticalError(
                    f"the {name} ended with code {server.returncode}:\n"
                    + self._log(name)
                )

    def lines(
        self, command: subprocess.Popen[str], deadline: Deadline
    ) -> Iterator[str]:
        """Yield a command's output; raise if a server ends or the deadline passes."""
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
            deadline.remaining()

    def list_runs(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Return the SuperLink's list of runs."""
        command = ["flwr", "list", CONNECTION, "--format", "json"]
        process = self.start(command, errors=subprocess.PIPE)
        answer = complaint = ""
        try:
            answer, complaint = process.communicate(timeout=deadline.remaining())
            runs: list[dict[str, Any]] = json.loads(answer)["runs"]
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
            raise VerticalError(
                f"flwr list did not report how the run ended:\n{answer}{complaint}"
            ) from error
        return runs

    def stop(self) -> None:
        """End every process of the run and wait until none is left."""
        left = self._reaper.end()
        for process in self._processes:
            process.poll()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if left:
            raise VerticalError(
                f"could not end the processes {sorted(left)} of the run"
            )

    def _log(self, name: str) -> str:
        text = self._logs[name].read_text(errors="replace")
        return "\n".join(plain(text).splitlines()[-LAST_LINES:])


def plain(text: str) -> str:
    """Return a text without terminal colour codes."""
    return _COLOUR.sub("", text)


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def answers(port: int, authority: Path | None = None) -> bool:
    """Return whether a SuperLink answers on loopback, over TLS with an authority."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if authority is not None:
        trust = ssl.create_default_context(cafile=str(authority))
        handlers.append(urllib.request.HTTPSHandler(context=trust))
    address = f"{'https' if authority else 'http'}://{LOOPBACK}:{port}/health"
    try:
        with urllib.request.build_opener(*handlers).open(address, timeout=1):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _environment(home: Path, folder: Path) -> dict[str, str]:
    env = dict(os.environ)
    scripts = sysconfig.get_path("scripts")
    env["PATH"] = os.pathsep.join([scripts, env.get("PATH", os.defpath)])
    env["FLWR_HOME"] = str(home)
    env["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    # Each poll costs the SuperExec and its server some milliseconds of a core.
    env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.2"
    env["RAY_TMPDIR"] = str(folder)
    env["RAY_ADDRESS"] = "local"
    env["PYTHONUNBUFFERED"] = "1"
    env["COLUMNS"] = "200"
    env.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env.setdefault("RAY_worker_niceness", "0")  # parties wait for each other
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [env.get(name), LOOPBACK, "localhost"]))
    return env
