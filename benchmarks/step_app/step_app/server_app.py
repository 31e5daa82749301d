"""Times all sides in turns."""

import json
import os
import time
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_vfl.grids.resident import ResidentGrid
from flower_vfl.strategies import VerticalStrategy

from . import trace
from .work import PlainLoop

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write the seconds of each side to the file that the run config names."""
    config = context.run_config
    batch_size, parties = int(config["batch-size"]), int(config["parties"])
    torch.set_num_threads(1)
    sides = ["split", "pipelined", "sealed"]
    if trace.FOLDER in os.environ:
        trace.install()
        sides = ["split"]
    loop = PlainLoop(parties, int(config["width"]), batch_size)
    strategies = {
        side: VerticalStrategy(
            batch_size=batch_size,
            test_fraction=0.0,
            evaluate_every=0,
            parties=parties + 1,
            threads=1,
            progress=False,
            sealed=side == "sealed",
            pipeline=int(side == "pipelined"),
        )
        for side in sides
    }
    seconds: dict[str, list[float]] = {side: [] for side in ("plain", *sides)}
    with ResidentGrid(grid, advertise=str(config["advertise"]) or None) as sessions:
        for turn in range(int(config["turns"]) + 1):
            found = {"plain": loop.epoch()}
            for side, strategy in strategies.items():
                training = strategy.connect(sessions)
                started = time.perf_counter()
                training.run()
                found[side] = (time.perf_counter() - started) / training.steps
            for side, value in found.items():
                if turn:  # the first turn warms up
                    seconds[side].append(value)
    Path(str(config["out"])).write_text(json.dumps(seconds))
    if trace.FOLDER in os.environ:
        trace.write()
