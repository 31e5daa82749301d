"""``flower-vfl run``: one run, from the command line or a TOML file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import PARTIES_FOLDER
from flower_vfl.simulations.runtime.engines import ENGINES, run_and_attack

from .options import AsJson, option, takes_settings
from .show import show_result


@takes_settings()
def run(
    config: RunConfig,
    resume: Annotated[
        bool, option("Continue from the newest checkpoint in --out.", "--resume")
    ] = False,
    engine: Annotated[
        str,
        option(
            "in-process: all parties in this process (fast). ray: parties are Flower "
            "clients under 'flwr run' that Ray actors keep in memory. flower: the same "
            "with one plain Flower message per request (slow)."
        ),
    ] = "in-process",
    out: Annotated[
        Path | None, option("Folder for result.json and the trained modules.")
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[bool, option("Show Flower's log.", "--verbose")] = False,
) -> None:
    """Train one model over several parties and report its metrics."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if resume and out is None:
        raise ConfigError("--resume needs the --out folder of the run to continue")
    folder = "" if out is None else str(out.resolve())
    config = replace(
        config,
        resume=resume,
        state_dir=str(Path(folder) / PARTIES_FOLDER) if folder else "",
        out=folder,
        transport="plain" if engine == "flower" else "resident",
    )
    try:
        document = run_and_attack(config, engine, verbose, not as_json)
    except KeyboardInterrupt:  # typer would exit without a message
        hint = "; the same command with --resume continues it" if folder else ""
        print(f"flower-vfl: interrupted{hint}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(document))
    else:
        show_result(document)
