"""A column of a paper's table by epoch, in runs that are longer than the table's.

The row is trained with `--epochs`, and with `--objective` if it is given, and a column
that is measured during training is read from each epoch alone. One line for each epoch:
the value of each seed and the mean. Test rows are not looked at.

    python benchmarks/paper_epochs.py florist-table-1 label-minority "attack AUC"
"""

from __future__ import annotations

import argparse
import logging
import statistics
from dataclasses import replace

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.papers.cell_metrics import READINGS, Found
from flower_vfl.simulations.papers.experiments import Column, load_experiment
from flower_vfl.simulations.results import table


def by_epoch(config: RunConfig, column: Column) -> list[float]:
    """Return the column's value in each epoch of one run."""
    nodes = config.parties + 1
    with InProcessGrid(client_app, nodes, config.to_run_config()) as grid:
        records = table(train(grid, config, "in-process", progress=False))
    read = READINGS[column.reading]
    return [
        read(Found(records[records["epoch"] == epoch]), **column.arguments)
        for epoch in range(1, config.epochs + 1)
    ]


def main() -> None:
    """Print the column's value in each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table")
    parser.add_argument("row", help="the labels of the row, with ' / ' between them")
    parser.add_argument("column")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--objective", help="instead of the table's")
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    experiment = load_experiment(given.table)
    rows = {row.name: row for row in experiment.rows}
    columns = {column.name: column for column in experiment.columns}
    for name, known in ((given.row, rows), (given.column, columns)):
        if name not in known:
            parser.error(f"{given.table} has no '{name}', but {', '.join(known)}")
    row, column = rows[given.row], columns[given.column]
    assert row.config is not None
    config = replace(row.config, epochs=given.epochs)
    if given.objective:
        config = replace(config, objective=given.objective)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    runs = [by_epoch(replace(config, seed=seed), column) for seed in seeds]
    heads = " | ".join(f"seed {seed}" for seed in seeds)
    print(f"| epoch | {heads} | mean |\n|" + "---|" * (len(seeds) + 2))
    for epoch, values in enumerate(zip(*runs, strict=True), 1):
        cells = " | ".join(f"{value:.3f}" for value in values)
        print(f"| {epoch} | {cells} | {statistics.fmean(values):.3f} |")


if __name__ == "__main__":
    main()
