"""GAFM's average ratio (Table 10) after fewer epochs than the table's.

A row of the table is trained anew with each number of epochs. One line for each: the
training AUC and the ratio of each seed, and the mean ratio. Test rows are not used.

    python benchmarks/gafm_ratio.py "Criteo / 1 / 0.3" --epochs 10 30 100
"""

from __future__ import annotations

import argparse
import logging
import statistics
from dataclasses import replace

import torch

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.papers.experiments import load_experiment
from flower_vfl.simulations.results import table


def measured(config: RunConfig) -> tuple[float, float]:
    """Return the training AUC of one run, and the mean leak AUC divided by it."""
    nodes = config.parties + 1
    with InProcessGrid(client_app, nodes, config.to_run_config()) as grid:
        records = table(train(grid, config, "in-process", progress=False))
    records = records[records["epoch"] == config.epochs]
    training = (records["metric"] == "auc") & (records["split"] == "train")
    auc = float(records["value"][training].iloc[0])
    leaks = records["value"][records["metric"] == "leak"]
    return auc, float(leaks.where(leaks > 0.5, 1 - leaks).mean()) / auc


def main() -> None:
    """Print one line for each number of epochs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", help="the labels of the row, with ' / ' between them")
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = {row.name: row.config for row in load_experiment("gafm-table-10").rows}
    if (config := rows.get(given.row)) is None:
        parser.error(f"there is no '{given.row}', but {', '.join(rows)}")
    print("| epochs | training AUC | ratio | mean ratio |\n|---|---|---|---|")
    for epochs in given.epochs:
        own = replace(config, epochs=epochs, capture=0)
        found = [measured(replace(own, seed=seed)) for seed in range(given.seeds)]
        aucs, ratios = zip(*found, strict=True)
        each = (" ".join(f"{value:.3f}" for value in v) for v in (aucs, ratios))
        cells = " | ".join(each)
        print(f"| {epochs} | {cells} | {statistics.fmean(ratios):.3f} |", flush=True)


if __name__ == "__main__":
    main()
