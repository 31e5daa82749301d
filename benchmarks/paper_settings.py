"""Settings of a paper's table tried on validation rows, epoch by epoch.

Takes the settings of one row, holds a fifth of the training rows out, and prints the
mean over seeds from 100 on after every epoch: metrics of the validation rows, and the
attack AUC of the epoch's batches where membership is attacked. Test rows are not read.

    python benchmarks/paper_settings.py florist-table-5 10 --set epochs=8
    python benchmarks/paper_settings.py gafm-original-table-1 "Spambase / GAFM(1)" \
        --set objective=gafm-original:gamma=30 --set evaluate_every=300
"""

import argparse
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.papers.experiments import load_experiment
from flower_vfl.simulations.results import table
from flower_vfl.simulations.runtime.engines import run_and_attack, set_log

FIRST_SEED = 100


def changed(config: RunConfig, settings: list[str]) -> RunConfig:
    """Return the settings of a row with some of them changed."""
    own: dict[str, Any] = {"capture": 0, "evaluate_every": 1, "valid_fraction": 0.2}
    for text in settings:
        name, _, value = text.partition("=")
        own[name] = type(getattr(config, name))(value)
    return replace(config, **own)


def by_epoch(config: RunConfig) -> pd.DataFrame:
    """Return what one run measured, one line for each metric and epoch."""
    records = table(run_and_attack(config, "in-process"))
    valid = records[(records["split"] == "valid") & (records["epoch"] > 0)]
    attacked = records[records["metric"] == "membership"].assign(split="attack AUC")
    found = pd.concat([valid.assign(attack=valid["metric"]), attacked])
    return found.groupby(["split", "attack", "epoch"], as_index=False)["value"].mean()


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", help="such as florist-table-5")
    parser.add_argument("row", help="its labels, such as 'Spambase / GAFM(1)'")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    set_log(verbose=False)
    rows = {row.name: row.config for row in load_experiment(arguments.table).rows}
    config = rows[arguments.row]
    assert config is not None, "the row cannot be run here"
    config = changed(config, arguments.set)
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    found = pd.concat([by_epoch(replace(config, seed=seed)) for seed in seeds])
    print(found.pivot_table("value", "epoch", ["split", "attack"]).round(3).to_string())


if __name__ == "__main__":
    main()
