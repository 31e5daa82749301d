"""One hop to every party and back: plain Flower messages against sessions.

Both kinds of hop are measured in the same run of the same app, with the same message.
``python benchmarks/hops.py`` measures a simulation (`flwr run` on Ray);
``--deployment`` measures a SuperLink and SuperNodes as separate processes, all on
loopback. Everything runs in a temporary folder and is stopped at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

PYPROJECT = """
[project]
name = "hops"
version = "1.0.0"
description = "Measures hops"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "hops.server_app:app"
clientapp = "hops.client_app:app"

[tool.flwr.app.config]
out = ""
parties = 1
plain = 1
fast = 1
payload = 1
"""

CLIENT_APP = '''
"""An app that knows nothing of sessions: it sends back what it gets."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_vfl.grids.resident import resident

echo = ClientApp()


@echo.query()
def query(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


app = resident(echo)
'''

SERVER_APP = """
import json
import statistics
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from flower_vfl.grids.resident import ResidentGrid

app = ServerApp()


def hop(grid, nodes, payload):
    array = Array("uint8", (len(payload),), "bytes", payload)
    content = RecordDict({"a": ArrayRecord({"x": array})})
    start = time.perf_counter()
    replies = list(grid.send_and_receive([Message(content, n, "query") for n in nodes]))
    seconds = time.perf_counter() - start
    assert len(replies) == len(nodes)
    for reply in replies:
        assert not reply.has_error(), reply.error
        assert reply.content.array_records["a"]["x"].data == payload
    return seconds


@app.main()
def main(grid, context):
    config = context.run_config
    while len(nodes := list(grid.get_node_ids())) < config["parties"]:
        time.sleep(0.2)
    payload = bytes(range(256)) * (config["payload"] // 256)
    hop(grid, nodes, payload)  # the first one starts Ray, or the processes
    plain = [hop(grid, nodes, payload) for _ in range(config["plain"])]
    with ResidentGrid(grid) as fast_grid:
        start = time.perf_counter()
        fast_grid.open()
        opened = time.perf_counter() - start
        for _ in range(20):
            hop(fast_grid, nodes, payload)
        fast = [hop(fast_grid, nodes, payload) for _ in range(config["fast"])]
    Path(config["out"]).write_text(
        json.dumps(
            {
                "plain": statistics.median(plain),
                "fast": statistics.median(fast),
                "fast_mean": statistics.mean(fast),
                "open": opened,
            }
        )
    )
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(
    stack: ExitStack, home: Path, name: str, *arguments: str
) -> subprocess.Popen[bytes]:
    """Start one of Flower's commands in a process group that ends with the stack."""
    command = Path(sys.executable).parent / name
    log = (home / f"{name}-{time.monotonic_ns()}.log").open("wb")
    stack.callback(log.close)
    process = subprocess.Popen(
        [str(command), *arguments],
        env={
            **os.environ,
            "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # as `flower-vfl --engine ray` sets it
        },
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    stack.callback(stop, process)
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url, timeout=1)
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} did not answer")


def measure(parties: int, deployment: bool, **config: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hops-")))
        home, app = folder / "home", folder / "app"
        (app / "hops").mkdir(parents=True)
        home.mkdir()
        out = folder / "result.json"
        (app / "pyproject.toml").write_text(PYPROJECT)
        (app / "hops" / "__init__.py").write_text("")
        (app / "hops" / "client_app.py").write_text(CLIENT_APP)
        (app / "hops" / "server_app.py").write_text(SERVER_APP)
        port = free_port()
        lines = ["[superlink]", 'default = "bench"', "[superlink.bench]"]
        lines += [f'address = "127.0.0.1:{port}"', "insecure = true"]
        if not deployment:
            lines += [f"options.num-supernodes = {parties}"]
            lines += ["options.backend.client-resources.num-cpus = 1"]
        (home / "config.toml").write_text("\n".join(lines) + "\n")
        mode = [] if deployment else ["--simulation"]
        superlink = start(
            stack,
            home,
            "flower-superlink",
            "--insecure",
            "--disable-runtime-dependency-installation",
            "--port",
            str(port),
            *mode,
        )
        wait_for(f"http://127.0.0.1:{port}/health", superlink, 60)
        if deployment:
            for number in range(parties):
                start(
                    stack,
                    home,
                    "flower-supernode",
                    "--insecure",
                    "--superlink",
                    f"127.0.0.1:{port}",
                    "--port",
                    str(free_port()),
                    "--node-config",
                    f"partition-id={number} num-partitions={parties}",
                )
        values = {"out": f'"{out}"', "parties": parties, **config}
        settings = " ".join(f"{key}={value}" for key, value in values.items())
        run = start(
            stack, home, "flwr", "run", str(app), "--stream", "--run-config", settings
        )
        run.wait(900)
        if not out.exists():
            for log in sorted(home.glob("*.log")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')}\n")
            raise SystemExit("the run failed; its logs are above")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deployment", action="store_true")
    parser.add_argument("--parties", type=int, nargs="+", help="default: 8, or 3")
    parser.add_argument("--plain", type=int, help="plain hops (default: 20, or 2)")
    parser.add_argument("--fast", type=int, default=300, help="hops over sessions")
    parser.add_argument("--payload", type=int, default=4096, help="bytes each way")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kind = "deployment" if args.deployment else "simulation"
    for parties in args.parties or [3 if args.deployment else 8]:
        result = measure(
            parties,
            args.deployment,
            plain=args.plain or (2 if args.deployment else 20),
            fast=args.fast,
            payload=args.payload,
        )
        ratio = result["plain"] / result["fast"]
        if args.json:
            print(json.dumps({"kind": kind, "parties": parties, **result}))
        else:
            print(
                f"{kind}, {parties} parties: a session is {ratio:.0f} times faster "
                f"(a hop takes {result['plain'] * 1e3:.1f} ms plain and "
                f"{result['fast'] * 1e3:.2f} ms over a session, which took "
                f"{result['open']:.1f} s to open)",
                flush=True,
            )


if __name__ == "__main__":
    main()
