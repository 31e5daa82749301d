"""What GAFM leaks after fewer epochs than a table's.

A row of the table is trained anew with each number of epochs. One line for each: the
training AUC of each seed, the mean leak AUC of each of the three attacks, and the mean
leak AUC divided by the training AUC (the ratio of Table 10) for each seed and on
average. Test rows are not used.

    python benchmarks/gafm_ratio.py "Criteo / 1 / 0.3" --epochs 10 30 100
    python benchmarks/gafm_ratio.py "IMDB / CE only" --table gafm-table-3
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


def measured(config: RunConfig) -> tuple[float, list[float]]:
    """Return the training AUC of one run, and the leak AUC of each attack."""
    nodes = config.parties + 1
    with InProcessGrid(client_app, nodes, config.to_run_config()) as grid:
        records = table(train(grid, config, "in-process", progress=False))
    records = records[records["epoch"] == config.epochs]
    training = (records["metric"] == "auc") & (records["split"] == "train")
    leaks = records["value"][records["metric"] == "leak"]
    auc = float(records["value"][training].iloc[0])
    return auc, [max(leak, 1.0 - leak) for leak in leaks]


def main() -> None:
    """Print one line for each number of epochs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", help="the labels of the row, with ' / ' between them")
    parser.add_argument("--table", default="gafm-table-10")
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = {row.name: row.config for row in load_experiment(given.table).rows}
    if (config := rows.get(given.row)) is None:
        parser.error(f"there is no '{given.row}', but {', '.join(rows)}")
    heads = "epochs", "training AUC", "norm, mean, median", "ratio", "mean ratio"
    print(f"| {' | '.join(heads)} |\n|" + "---|" * len(heads))
    for epochs in given.epochs:
        own = replace(config, epochs=epochs, capture=0)
        found = [measured(replace(own, seed=seed)) for seed in range(given.seeds)]
        aucs, leaks = zip(*found, strict=True)
        attacks = map(statistics.fmean, zip(*leaks, strict=True))
        ratios = [statistics.fmean(own) / auc for auc, own in found]
        cells = [" ".join(f"{v:.3f}" for v in each) for each in (aucs, attacks, ratios)]
        line = [str(epochs), *cells, f"{statistics.fmean(ratios):.3f}"]
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
