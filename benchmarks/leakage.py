"""Leak AUC of the score attacks on real data, with and without a defense.

For each dataset, defense and seed a split model is trained with the default settings of
``flower-vfl run`` and every gradient that leaves is attacked. One line for each dataset
and defense, mean over seeds and parties: the main test metric; the mean leak AUC over
all batches of each attack, flipped after the mean; the same on random gradients, which
is what an attack shows where nothing leaks; the mean bound on the AUC of every attack,
where the defense gives one; and how many of the runs' attacks stayed below it. The
class centers of ``mean`` and ``median`` are those of the batch itself, as in the
papers; ``mean:held_out=true`` takes them from its other half.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import tables
from flower_vfl.simulations.runtime.engines import run_in_process
from flower_vfl.simulations.studies.run_metrics import leaks
from flower_vfl.transform import AUC_BOUND

DATASETS = ("spambase", "credit-default", "criteo")
DEFENSES = ("none", "marvell:s=4")
ATTACKS = ("norm", "cosine", "mean", "median", "mean:held_out=true")


def one_run(dataset: str, defense: str, attacks: Sequence[str], seed: int) -> Any:
    """Return the result document of one run."""
    config = RunConfig(
        dataset=dataset,
        defense=defense,
        seed=seed,
        attack=",".join(attacks),
        leak_baseline=True,
        reproducible_noise=True,
    )
    document = run_in_process(config, verbose=False, bar=False)
    names = [f"test_{name}" for name in MAIN_METRIC.values()]
    score = next(document["final"][n] for n in names if n in document["final"])
    return score, tables({"": document})


def flip(auc: float) -> float:
    """Return the AUC of the attack or of its opposite, whichever finds more."""
    return max(auc, 1.0 - auc)


def main() -> None:
    """Print one line per dataset and defense."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--defenses", default=";".join(DEFENSES), help="joined by ;")
    parser.add_argument("--attacks", default=";".join(ATTACKS), help="joined by ;")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    attacks = [part.strip() for part in options.attacks.split(";")]
    shown = " | ".join(attacks)
    print(f"| dataset | defense | test | {shown} | bound | attacks below it |")
    print("|" + "---|" * (5 + len(attacks)))
    for dataset in options.datasets.split(","):
        for defense in options.defenses.split(";"):
            runs = [
                one_run(dataset, defense.strip(), attacks, seed)
                for seed in range(options.seeds)
            ]
            print(line(dataset, defense.strip(), attacks, runs), flush=True)


def line(dataset: str, defense: str, attacks: Sequence[str], runs: list[Any]) -> str:
    """Return one line of the table."""
    cells = [dataset, f"`{defense}`", f"{statistics.mean(r[0] for r in runs):.3f}"]
    for attack in attacks:
        found = pd.concat([leaks(records) for _, records in runs])
        found = found[(found["attack"] == attack) & ~found["coalition"]]
        nothing = found["raw"][found["random"]].mean()
        values = found["raw"][~found["random"]].map(flip)
        cells.append(f"{values.mean():.3f} ({nothing:.3f})")
    bounds, below = [], []
    for _, records in runs:
        steps = records[records["metric"] == AUC_BOUND]
        found = leaks(records).query("not random and not coalition").set_index("party")
        for party, bound in steps.groupby("party")["value"].mean().items():
            bounds.append(bound)
            below += list(found["raw"].loc[[party]].map(flip) <= bound)
    if not bounds:
        return "| " + " | ".join([*cells, "", ""]) + " |"
    cells += [f"{statistics.mean(bounds):.3f}", f"{sum(below)} of {len(below)}"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
