"""Settings of GAFM's tables that the paper leaves open, chosen on validation rows.

Each case is a row of a table with some settings changed. A fifth of the training rows
is held out, the seeds start at 100, and the test rows are not looked at. One line per
candidate: the validation AUC of each seed, its mean and its smallest value.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from typing import Any

import torch

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.papers.experiments import load_experiment

FIRST_SEED = 100
_DELTA = {"Spambase": 0.05, "IMDB": 0.1, "Criteo": 0.5}
# By name a row of Table 2 or of several classes, and by candidate what is changed.
Case = tuple[str, dict[str, dict[str, Any]]]
CASES: dict[str, Case] = {
    name.lower(): (
        f"{name} / GAFM",
        {
            "one hidden layer": {"objective": f"gafm:delta={delta}"},
            "released": {"objective": f"gafm:delta={delta},released=true"},
        },
    )
    for name, delta in _DELTA.items()
}
for _method in ("GAFM", "Vanilla"):  # which share their settings
    CASES[f"isic-{_method.lower()}"] = (
        f"ISIC / {_method}",
        {
            f"lr {rate}, {epochs} epochs": {
                "optimizer": f"adam:lr={rate}",
                "epochs": epochs,
            }
            for rate, epochs in (("1e-3", 10), ("3e-4", 10), ("3e-4", 20), ("3e-5", 10))
        },
    )
CASES["criteo-epochs"] = (
    "Criteo / Vanilla",
    {f"{epochs} epochs": {"epochs": epochs} for epochs in (25, 50, 100)},
)
CASES["digits"] = (
    "Digits / GAFM",
    {
        f"Δ {delta}, lr {rate}": {
            "objective": f"gafm:delta={delta}",
            "optimizer": f"adam:lr={rate}",
        }
        for delta in (0.5, 0.9)
        for rate in ("2e-3", "5e-4", "1e-4")
    },
)


def validated(config: RunConfig, seed: int) -> float:
    """Return the validation AUC of one run, its accuracy with several classes."""
    own = {"attack": "", "capture": 0, "train_metrics": False, "seed": seed}
    config = replace(config, valid_fraction=0.2, **own)  # type: ignore[arg-type]
    with InProcessGrid(client_app, config.parties + 1, config.to_run_config()) as grid:
        document = train(grid, config, "in-process", progress=False)
    found = document["final"]
    return float(found.get("valid_auc", found["valid_accuracy"]))


def main() -> None:
    """Print the validation AUC of every candidate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="instead of the table's")
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    row, candidates = CASES[given.case]
    tables = [load_experiment(f"gafm-table-{number}") for number in (2, 12)]
    rows = {each.name: each.config for table in tables for each in table.rows}
    config = rows[row]
    assert config is not None  # its data is there
    config = replace(config, epochs=given.epochs or config.epochs)
    print("| candidate | seeds | mean | smallest |\n|---|---|---|---|")
    for name, changed in candidates.items():
        own = replace(config, **changed)
        seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
        aucs = [validated(own, seed) for seed in seeds]
        each = " ".join(f"{auc:.3f}" for auc in aucs)
        mean = sum(aucs) / len(aucs)
        print(f"| {name} | {each} | {mean:.3f} | {min(aucs):.3f} |", flush=True)


if __name__ == "__main__":
    main()
