"""Run a Flower app with ``flwr run`` on a private SuperLink, and clean up afterwards.

``flwr run`` on its own starts one SuperLink per machine on a fixed port and leaves it
running. :func:`run_app` starts a SuperLink and a SuperExec on a free loopback port,
submits the app, asks ``flwr list`` how the run ended, and stops every process:

- ``FLWR_HOME`` is a private folder, so that neither the user's Flower configuration
  nor another run is touched; ``RAY_TMPDIR`` and ``RAY_ADDRESS=local`` do this for Ray;
- the app process, Ray and its workers stay in the SuperExec's Unix session, which
  :class:`~.process_reaper.ProcessReaper` ends even if the caller is killed.
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
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import tomli_w
from flwr.common.config import flatten_dict

from flower_vfl.errors import ConfigError, VerticalError, check_name

from .process_reaper import ProcessReaper

if TYPE_CHECKING:
    from flower_vfl.simulations.config import ConfigValue
    from flower_vfl.simulations.deployment.cluster import ServerFiles

Process: TypeAlias = "subprocess.Popen[str]"

LOOPBACK = "127.0.0.1"
CONNECTION = "flower-vfl"  # name of the SuperLink in Flower's configuration
LAST_LINES = 30  # lines of a log that an error repeats
_POLL = 0.05  # seconds between two checks of a process or an address
_SERVER_START = 60.0  # seconds until the SuperLink must answer
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OWNER = "# Written by flower-vfl for one run.\n"
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
    with _temporary_folder() as folder, ExitStack() as stack:
        home, port = folder / "flwr" if home is None else home.resolve(), free_port()
        connection = home / "config.toml"
        if connection.exists() and not connection.read_text().startswith(_OWNER):
            text = "holds a Flower configuration that flower-vfl did not write"
            raise ConfigError(f"{home} {text}; give an empty folder")
        write_connection(home, port)
        write_settings(home / "run-config.toml", run_config)
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
    # They lie about 70 characters below it; the path of a Unix socket has 103.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp"
    with tempfile.TemporaryDirectory(
        prefix="vfl-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


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
        lines = "\n".join(["The last lines of its log:", *log])
        raise VerticalError(f"the Flower run is {status}: {details}\n{lines}")


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
        text = f"the Flower run did not end within {self._timeout} s and was stopped"
        remedy = "raise the timeout, or see its log for what it waits for"
        raise VerticalError(f"{text}; {remedy}")


class Runtime:
    """The processes of one run: servers, commands, and all their children."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._environment = _environment(home, folder)
        self._processes: list[Process] = []
        self._servers: dict[str, Process] = {}
        self._logs = folder
        self._reaper = ProcessReaper(folder)

    def start(
        self,
        command: Sequence[str],
        output: IO[str] | int = subprocess.PIPE,
        errors: int = subprocess.STDOUT,
    ) -> Process:
        """Start one of Flower's commands as the leader of a new Unix session."""
        path = shutil.which(command[0], path=self._environment["PATH"])
        if path is None:
            remedy = f"install flwr[simulation] for {sys.executable}"
            raise VerticalError(f"the command '{command[0]}' is missing: {remedy}")
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
    ) -> dict[str, Process]:
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
        self._logs = logs
        for name, options in (("superlink", link), ("superexec", executor)):
            command, log = [f"flower-{name}", *options], logs / f"{name}.log"
            self._servers[name] = self.start_logged(command, log)
        patience = time.monotonic() + _SERVER_START
        while not answers(port, tls.authority if tls else None):
            self.check_servers()
            if time.monotonic() > patience:
                text = f"the SuperLink did not answer within {_SERVER_START:.0f} s"
                raise VerticalError(f"{text}:\n{self._log('superlink')}")
            time.sleep(_POLL)
        self.check_servers()  # the answer came from this SuperLink, not from another
        return self._servers

    def start_logged(self, command: Sequence[str], log: Path) -> Process:
        """Start a command whose output is appended to a log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            return self.start(command, file)

    def check_servers(self) -> None:
        """Raise if a server has ended."""
        for name, server in self._servers.items():
            if server.poll() is not None:
                text = f"the {name} ended with code {server.returncode}"
                raise VerticalError(f"{text}:\n{self._log(name)}")

    def lines(self, command: Process, deadline: Deadline) -> Iterator[str]:
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
            text = "flwr list did not report how the run ended"
            raise VerticalError(f"{text}:\n{answer}{complaint}") from error
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
            raise VerticalError(f"could not end processes of the run: {sorted(left)}")

    def _log(self, name: str) -> str:
        text = (self._logs / f"{name}.log").read_text(errors="replace")
        return "\n".join(plain(text).splitlines()[-LAST_LINES:])


def plain(text: str) -> str:
    """Return a text without terminal colour codes."""
    return _COLOUR.sub("", text)


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


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
    # Parties wait for each other, so that none is nicer than others.
    switched_off = "FLWR_TELEMETRY_ENABLED RAY_USAGE_STATS_ENABLED RAY_worker_niceness"
    env = dict.fromkeys(switched_off.split(), "0") | dict(os.environ)
    scripts = sysconfig.get_path("scripts")
    env["PATH"] = os.pathsep.join([scripts, env.get("PATH", os.defpath)])
    env |= {"FLWR_HOME": str(home), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    # Each poll costs the SuperExec and its server some milliseconds of a core.
    env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.2"
    env |= {"RAY_TMPDIR": str(folder), "RAY_ADDRESS": "local"}
    env |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [env.get(name), LOOPBACK, "localhost"]))
    return env
