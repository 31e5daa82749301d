"""Run a Flower app with ``flwr run`` on a SuperLink of its own, and leave no trace.

``flwr run`` on its own starts one SuperLink per machine on a fixed port and leaves it
running. Here every call starts a SuperLink and a SuperExec on a free loopback port,
submits the app with ``flwr run --stream``, asks ``flwr list`` how the run ended, and
stops every process that was started. Four settings make that private and quick:

- ``FLWR_HOME`` is a folder of the call, so that neither the user's Flower configuration
  nor another run is touched; ``RAY_TMPDIR`` and ``RAY_ADDRESS=local`` do it for Ray;
- the SuperExec is started by this module, not by the SuperLink, so that the process
  ids are known. The app process, Ray and Ray's workers stay in its Unix session, also
  those whose parent has died: stopping a run is ending the processes of a session;
- the SuperExec is not allowed to install dependencies: the app runs in the environment
  that called it, and no network is needed;
- a watchman ends them even if the calling process is killed (see ``watchman``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flower_vfl.errors import ConfigError, VerticalError, unknown_name

from .flower_runtime import CONNECTION, LAST_LINES, Deadline, Runtime, free_port, plain

ConfigValue = str | int | float | bool

_OWNER = "# Written by flower-vfl for one run.\n"
# Ray's sockets lie about 70 characters below its folder; a Unix socket's path has 103.
_LONGEST_TEMPORARY_FOLDER = 20
_FRAME = "╭╮╰╯─│ "


def run_app(
    app: Path,
    *,
    run_config: Mapping[str, ConfigValue],
    nodes: int,
    client_cpus: int = 1,
    client_gpus: float = 0,
    ray_cpus: int | None = None,
    home: Path | None = None,
    timeout: float | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a Flower app in Flower's simulation runtime and wait for its end."""
    if os.name != "posix":
        raise VerticalError(
            "the Flower engine needs Linux or macOS; on Windows run it in WSL2, "
            "or use the in-process engine"
        )
    if importlib.util.find_spec("ray") is None:
        raise VerticalError(
            "the Flower engine needs Ray: pip install 'flower-vfl[sim]', "
            "or use the in-process engine"
        )
    _check_settings(app, run_config)
    _check_resources(nodes, client_cpus, ray_cpus)
    federation = (
        f"num-supernodes={nodes} client-resources-num-cpus={client_cpus} "
        f"client-resources-num-gpus={float(client_gpus)}"
    )
    if ray_cpus is not None:
        federation += f" init-args-num-cpus={ray_cpus}"
    deadline = Deadline(timeout)
    with ExitStack() as stack:
        folder = stack.enter_context(_temporary_folder())
        home = folder / "flwr" if home is None else home.resolve()
        port = free_port()
        _write_home(home, port, run_config)
        runtime = stack.enter_context(Runtime(home, folder))
        runtime.start_servers(port, deadline)
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
            raise VerticalError("flwr run refused the app:\n" + _unframed(log))
        _check_outcome(runtime.list_runs(deadline), log)


def _check_settings(app: Path, run_config: Mapping[str, ConfigValue]) -> None:
    """Name a wrong key here: the SuperLink only says that some key is wrong."""
    pyproject = app / "pyproject.toml"
    if not pyproject.is_file():
        raise ConfigError(f"{app} is not a Flower app: it has no pyproject.toml")
    settings = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    for table in ("tool", "flwr", "app", "config"):
        settings = settings.get(table, {})
    known = set(_dotted_keys(settings))
    for key in run_config:
        if key not in known:
            raise unknown_name(f"setting of the app '{app.name}'", key, known)


def _check_resources(nodes: int, client_cpus: int, ray_cpus: int | None) -> None:
    for name, value in {"nodes": nodes, "client_cpus": client_cpus}.items():
        if value < 1 or value != int(value):
            raise ConfigError(f"{name} must be a whole number from 1 on, not {value}")
    if ray_cpus is not None and ray_cpus < client_cpus:
        raise ConfigError(
            f"an actor of {client_cpus} CPUs does not fit into Ray's {ray_cpus}; "
            "raise ray_cpus, which may be more than the machine has"
        )


def _dotted_keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Give a folder with a path short enough for the sockets of Ray."""
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_TEMPORARY_FOLDER:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(
        prefix="vfl-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _write_home(home: Path, port: int, run_config: Mapping[str, ConfigValue]) -> None:
    home.mkdir(parents=True, exist_ok=True)
    connection = home / "config.toml"
    if connection.exists() and not connection.read_text().startswith(_OWNER):
        raise ConfigError(
            f"{home} holds a Flower configuration that flower-vfl did not write; "
            "give an empty folder"
        )
    connection.write_text(
        f'{_OWNER}[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    settings = [f"{_toml(key)} = {_toml(value)}\n" for key, value in run_config.items()]
    (home / "run-config.toml").write_text("".join(settings), encoding="utf-8")


def _toml(value: ConfigValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # a JSON string is a TOML string, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value)) if isinstance(value, float) else str(int(value))


def _check_outcome(runs: list[dict[str, Any]], log: Sequence[str]) -> None:
    if len(runs) != 1:
        raise VerticalError(f"expected one run on the SuperLink, found {len(runs)}")
    status = runs[0]["status"]
    if status != "finished:completed":
        details = plain(runs[0]["status-details"])
        if "heartbeat" in details:
            details += " (its process was ended from outside; was memory short?)"
        raise VerticalError(
            f"the Flower run is {status}: {details}\n"
            "The last lines of its log:\n" + "\n".join(log)
        )


def _unframed(lines: Sequence[str]) -> str:
    return "\n".join(filter(None, (line.strip(_FRAME) for line in lines)))
