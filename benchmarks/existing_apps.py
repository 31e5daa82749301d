"""Leak AUC of two third-party Flower apps with and without the two adapters.

The apps are those of the tests (``tests/support/third_party_apps.py``): in the first
one the server holds the labels, in the second one a client. Prints the table of
``docs/existing-deployments.md``; every number is the mean over the noise seeds.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_vfl import InProcessGrid

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from third_party_apps import run_digits, run_tumours

DEFENSES = (None, "none", "marvell:s=1", "marvell:s=4", "marvell:s=16")
APPS = {"`defended_grid`": run_tumours, "`defense_mod`": run_digits}


def row(adapter: str, defense: str | None, seeds: int) -> str:
    """Return one line of the table."""
    results = []
    for seed in range(seeds if defense else 1):
        given: dict[str, Any] = {"defense": defense, "seed": seed} if defense else {}
        outcome = APPS[adapter](InProcessGrid, **given)
        leaks = outcome.leaks()
        results.append((outcome.auc, leaks["norm"], leaks["cosine"]))
    numbers = " | ".join(f"{number:.3f}" for number in np.mean(results, axis=0))
    return f"| {adapter} | {f'`{defense}`' if defense else 'before'} | {numbers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="noise seeds to average")
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print("| adapter | defense | test AUC | norm leak AUC | cosine leak AUC |")
    print("|---|---|---|---|---|")
    for adapter in APPS:
        for defense in DEFENSES:
            print(row(adapter, defense, seeds), flush=True)


if __name__ == "__main__":
    main()
