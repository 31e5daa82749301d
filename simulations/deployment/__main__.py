"""``python -m flower_vfl.simulations.deployment``: a whole deployment on this machine.

Starts a server and three organisations as separate processes with certificates and
keys, trains one model over their files, and stops every process.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.simulations.results import load_result
from flower_vfl.simulations.runtime.flower_runtime import ConfigValue

from .cluster import ID_COLUMN, LABEL_COLUMN, Cluster, write_party_files


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m flower_vfl.simulations.deployment",
        description="Train over three organisations that run as separate processes on "
        "this machine: a bank that holds the labels, a shop and a telephone company. "
        "All traffic is encrypted and stays on loopback. It takes about 45 seconds, "
        "most of which Flower needs to start.",
    )
    parser.add_argument(
        "--dataset",
        default="breast-cancer",
        help="built-in table that is divided among the three (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs", type=int, default=20, help="number of epochs (default: 20)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="rows per batch (default: 32)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the run (default: 0)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="empty folder to keep data files, logs, checkpoints, keys and the result "
        "of each machine (default: they are deleted)",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="send each request as a plain Flower message instead of over an open "
        "session; a step then takes about 20 seconds",
    )
    return parser.parse_args(arguments)


def settings(options: argparse.Namespace, server: Path) -> dict[str, ConfigValue]:
    """Return the run config; each party's node config names its own data file."""
    return {
        "id-column": ID_COLUMN,
        "label-column": LABEL_COLUMN,
        "parties": 2,
        "epochs": options.epochs,
        "batch-size": options.batch_size,
        "seed": options.seed,
        "checkpoint-every": 100,
        "transport": "plain" if options.plain else "resident",
        "state-dir": str(server / "state"),
        "out": str(server / "result"),
    }


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the deployment, train, stop it, and return the result document."""
    parties = write_party_files(folder, options.dataset)
    with Cluster(folder, parties, _say) as cluster:
        run_id = cluster.submit(settings(options, cluster.server))
        _say(f"run {run_id} is submitted; the parties join, and training begins")
        cluster.follow(run_id, lambda line: _say(f"  {line}"))
        status, details = cluster.status(run_id)
        _say("stopping every process")
    if status != "finished:completed":
        raise VerticalError(f"the run is {status}: {details}")
    return load_result(cluster.server / "result")


def main() -> None:
    """Run the command; an error is one line, not a traceback."""
    options = parse()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with ExitStack() as stack:
            folder: Path = options.keep or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="vfl-"))
            )
            if folder.exists() and any(folder.iterdir()):
                raise ConfigError(f"'{folder}' is not empty; give a new folder")
            document = run(options, folder)
    except VerticalError as error:
        print(f"deployment: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("deployment: interrupted; every process was stopped", file=sys.stderr)
        sys.exit(130)
    for name, value in document["final"].items():
        _say(f"{name.replace('_', ' ')}: {value:.4f}")
    step = document["seconds"]["step"]
    _say(f"{step * 1e3:.1f} ms per step over {options.epochs} epochs")
    if options.keep:
        _say(f"kept in {options.keep}")


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
