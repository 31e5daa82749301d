"""``python -m flower_vfl.simulations.deployment``: a whole deployment on this machine.

Starts a server and three organisations as separate processes with certificates and
keys, trains one model over their files, and stops every process.
"""

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from typer import Option

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.simulations.results import load_result

from ..runtime.flower_runtime import write_settings
from .cluster import ID_COLUMN, LABEL_COLUMN, Cluster, write_party_files


def main(
    dataset: Annotated[str, Option(help="Built-in table.")] = "breast-cancer",
    epochs: Annotated[int, Option(help="Number of epochs.")] = 20,
    batch_size: Annotated[int, Option(help="Rows per batch.")] = 32,
    seed: Annotated[int, Option(help="Seed of the run.")] = 0,
    keep: Annotated[
        Path | None, Option(help="Empty folder for what each machine keeps.")
    ] = None,
    plain: Annotated[
        bool, Option("--plain", help="No sessions: a step takes about 20 seconds.")
    ] = False,
) -> None:
    """Train over three organisations that run as separate processes on this machine.

    They are a bank that holds the labels, a shop and a telephone company. All traffic
    is encrypted and stays on loopback. It takes about 45 seconds, most of which Flower
    needs to start.
    """
    settings: dict[str, Any] = {"id-column": ID_COLUMN, "label-column": LABEL_COLUMN}
    settings |= {"parties": 2, "epochs": epochs, "batch-size": batch_size, "seed": seed}
    settings["checkpoint-every"] = 100
    settings["transport"] = "plain" if plain else "resident"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with ExitStack() as stack:
            enter = stack.enter_context
            folder = keep or Path(enter(TemporaryDirectory(prefix="vfl-")))
            if folder.exists() and any(folder.iterdir()):
                raise ConfigError(f"'{folder}' is not empty; give a new folder")
            document = run(folder, dataset, settings)
    except VerticalError as error:
        print(f"deployment: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("deployment: interrupted; every process was stopped", file=sys.stderr)
        sys.exit(130)
    for name, value in document["final"].items():
        _say(f"{name.replace('_', ' ')}: {value:.4f}")
    step = document["seconds"]["step"]
    _say(f"{step * 1e3:.1f} ms per step over {epochs} epochs")
    if keep:
        _say(f"kept in {keep}")


def run(folder: Path, dataset: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Start the deployment, train, stop it, and return the result document."""
    with Cluster(folder, write_party_files(folder, dataset), _say) as cluster:
        state, result = cluster.server / "state", cluster.server / "result"
        table = folder / "nodes.toml"
        roles = {name: f"{p.role} {name}" for name, p in cluster.parties.items()}
        write_settings(table, roles)
        places = {"state-dir": str(state), "out": str(result), "nodes": str(table)}
        run_id = cluster.submit(settings | places)
        _say(f"run {run_id} is submitted; the parties join, and training begins")
        cluster.follow(run_id, lambda line: _say(f"  {line}"))
        status, details = cluster.status(run_id)
        _say("stopping every process")
    if status != "finished:completed":
        raise VerticalError(f"the run is {status}: {details}")
    return load_result(result)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    typer.run(main)
