from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.simulations.runtime import flower_runtime
from flower_vfl.simulations.runtime.flower_runtime import run_app

PYPROJECT = """
[project]
name = "dummy"
version = "1.0.0"
description = "An app that doubles numbers"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "dummy.server_app:app"
clientapp = "dummy.client_app:app"

[tool.flwr.app.config]
fail = "nobody"
nodes = 1
result = ""

[tool.flwr.app.config.table]
text = ""
"""

CLIENT_APP = """
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
@app.train()
def answer(message, context):
    if context.run_config["fail"] == "client":
        raise ValueError("the client was told to fail")
    seen = context.state["seen"]["n"] if "seen" in context.state else 0
    context.state["seen"] = MetricRecord({"n": seen + 1})
    double = message.content["x"]["x"].numpy() * 2
    content = RecordDict(
        {"x": ArrayRecord({"x": Array(double)}), "seen": context.state["seen"]}
    )
    return Message(content, reply_to=message)
"""

SERVER_APP = """
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    while len(nodes := list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.01)
    rounds = []
    for kind in ("query", "train"):
        x = RecordDict({"x": ArrayRecord({"x": Array(np.array([1.0, 2.0]))})})
        messages = [Message(x, dst_node_id=n, message_type=kind) for n in nodes]
        replies = list(grid.send_and_receive(messages))
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
        rounds.append(
            [
                [r.content["x"]["x"].numpy().tolist(), r.content["seen"]["n"]]
                for r in replies
            ]
        )
        print("finished", kind, flush=True)
    Path(config["result"]).write_text(
        json.dumps({"rounds": rounds, "text": config["table.text"]})
    )
    while config["fail"] == "never end":
        time.sleep(0.1)
    if config["fail"] == "server":
        raise ValueError("the server was told to fail")
"""

flower = pytest.mark.flower
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    package = tmp_path / "app" / "dummy"
    package.mkdir(parents=True)
    (package.parent / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").touch()
    (package / "client_app.py").write_text(CLIENT_APP)
    (package / "server_app.py").write_text(SERVER_APP)
    return package.parent


def processes_of(home: Path) -> set[str]:
    """Return the names of the living processes that were started with a Flower home."""
    names = set()
    for entry in Path("/proc").iterdir():
        try:
            if f"FLWR_HOME={home}\0" in (entry / "environ").read_text(errors="ignore"):
                names.add((entry / "comm").read_text().strip())
        except OSError:  # not a process, or gone, or of somebody else
            continue
    return names


def files_in(folder: Path) -> set[Path]:
    """Return what lies in a folder, without the bytecode of what was imported."""
    paths = {path.relative_to(folder) for path in folder.rglob("*")}
    return {path for path in paths if "__pycache__" not in path.parts}


@pytest.mark.extra
@flower
@needs_proc
def test_a_run_exchanges_messages_fails_and_leaves_nothing(
    app: Path, tmp_path: Path
) -> None:
    """Runs that do not fail are those of test_app; failures as such are below."""
    home, result = tmp_path / "home", tmp_path / "result.json"
    text = 'a "quoted" text = with spaces, a \\ and an é'
    before = files_in(app)
    lines: list[str] = []
    during: set[str] = set()

    def on_line(line: str) -> None:
        lines.append(line)
        if line == "finished query":
            during.update(processes_of(home))

    settings = {"result": str(result), "table.text": text, "nodes": 2, "fail": "server"}
    given = {"nodes": 2, "home": home, "timeout": 400, "on_line": on_line}
    with pytest.raises(VerticalError, match="the server was told to fail"):
        run_app(app, run_config=settings, **given)

    assert json.loads(result.read_text()) == {
        "rounds": [[[[2.0, 4.0], 1]] * 2, [[[2.0, 4.0], 2]] * 2],
        "text": text,
    }
    assert [line for line in lines if line.startswith("finished")] == [
        "finished query",
        "finished train",
    ]
    # The process search does see the processes, so that its silence means something.
    assert {"flower-superlin", "flower-superexe", "raylet", "gcs_server"} <= during
    assert processes_of(home) == set()
    assert files_in(app) == before
    assert (home / "superlink.log").exists()


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([{"status": "finished:completed", "status-details": "N/A"}], None),
        (
            [{"status": "finished:failed", "status-details": "\x1b[1mit broke"}],
            r"is finished:failed: it broke\n.* its log:\nthe first\nthe last line$",
        ),
        (
            [{"status": "finished:failed", "status-details": "no heartbeat"}],
            "did the machine run out of memory",
        ),
        ([], "expected one run on the SuperLink, found 0"),
    ],
)
def test_a_failed_run_is_an_error(runs: list[dict[str, str]], told: str | None) -> None:
    raised = pytest.raises(VerticalError, match=told) if told else nullcontext()
    with raised:
        flower_runtime._check_outcome(runs, ["the first", "the last line"])


@pytest.mark.extra
@flower
@needs_proc
def test_the_error_of_a_client_is_raised(app: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pytest.raises(VerticalError, match="the client was told to fail"):
        run_app(app, run_config={"fail": "client"}, nodes=1, home=home, timeout=400)
    assert processes_of(home) == set()


@pytest.mark.extra
@flower
@needs_proc
def test_a_run_without_end_is_stopped(app: Path, tmp_path: Path) -> None:
    home, result = tmp_path / "home", tmp_path / "result.json"
    during: set[str] = set()

    def on_line(line: str) -> None:
        if line == "finished train":
            during.update(processes_of(home))
            raise KeyboardInterrupt

    settings = {"fail": "never end", "result": str(result)}
    with pytest.raises(KeyboardInterrupt):
        run_app(app, run_config=settings, nodes=2, home=home, on_line=on_line)
    assert "raylet" in during
    assert processes_of(home) == set()


@flower
@needs_proc
def test_a_run_is_stopped_after_its_time(app: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = files_in(app)
    during: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            during.update(processes_of(home))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    with pytest.raises(VerticalError, match=r"did not end within 2\.0 s"):
        run_app(app, run_config={}, nodes=1, home=home, timeout=2.0)
    assert time.monotonic() - start >= 2.0
    done.set()
    watcher.join()
    # The process search does see the processes, so that its silence means something.
    assert "flower-superlin" in during
    assert processes_of(home) == set()
    assert files_in(app) == before


@pytest.mark.extra
@flower
@needs_proc
def test_a_killed_caller_leaves_nothing(app: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = (
        "from pathlib import Path\n"
        "from flower_vfl.simulations.runtime.flower_runtime import run_app\n"
        f"run_app(Path({str(app)!r}), run_config={{'fail': 'never end'}}, nodes=1,\n"
        f"        home=Path({str(home)!r}), on_line=lambda line: print(flush=True))\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    caller.stdout.readline()
    assert "flower-superlin" in processes_of(home)
    caller.kill()
    caller.communicate()
    end = time.monotonic() + 60
    while processes_of(home) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_of(home) == set()


def test_an_unknown_setting_is_named(app: Path) -> None:
    known = r"fail, nodes, result, table\.text"
    with pytest.raises(ConfigError, match=f"'epoch'; known: {known}"):
        run_app(app, run_config={"epoch": 3}, nodes=1)


def test_a_folder_without_app_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pyproject\.toml"):
        run_app(tmp_path, run_config={}, nodes=1)


def test_a_users_flower_home_is_not_overwritten(app: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[superlink]\ndefault = "mine"\n')
    with pytest.raises(ConfigError, match="did not write"):
        run_app(app, run_config={}, nodes=1, home=tmp_path)
    assert config.read_text() == '[superlink]\ndefault = "mine"\n'


def test_settings_survive_the_way_through_toml(tmp_path: Path) -> None:
    settings: dict[str, str | int | float | bool] = {
        "text": "quotes \" and ' and \\ and \n and \x7f and é and 😀",
        "a.b": True,
        "whole": -3,
        "real": 1e-7,
        "infinite": float("inf"),
    }
    flower_runtime.write_settings(tmp_path / "settings.toml", settings)
    assert tomllib.loads((tmp_path / "settings.toml").read_text()) == settings


def test_ray_gets_a_folder_with_a_short_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    with flower_runtime._temporary_folder() as folder:
        session = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
        assert len(os.fsencode(folder / session)) <= 103
    assert not folder.exists()
