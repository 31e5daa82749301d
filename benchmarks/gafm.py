"""What GAFM's gradients reveal if a party averages them over all epochs (Spambase).

Soft scores on every batch of all epochs, then the same attacks on each example's
gradient averaged over the epochs, at the party that they tell most. One line for each
method. The model and the training are those of the paper (appendix E); its tables are
printed by ``flower-vfl reproduce gafm-table-2``.
"""

from __future__ import annotations

import argparse
import logging
import statistics

import torch

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import tables
from flower_vfl.simulations.studies.run_metrics import largest_leaks

SCORES = ("norm", "cosine", "mean:held_out=true")
GAFM = "gafm:delta=0.05,gamma=1"
METHODS = {  # objective, defense
    "GAFM": (GAFM, ""),
    "Marvell": ("auto", "marvell:s=4"),
    "Max Norm": ("auto", "max-norm"),
    "Vanilla": ("auto", ""),
    "GAFM + Marvell": (GAFM, "marvell:s=4"),
}


def settings(method: str, seed: int, epochs: int, attack: str) -> RunConfig:
    """Return the settings of one run."""
    objective, defense = METHODS[method]
    return RunConfig(
        dataset="spambase",
        parties=1,
        bottom="gafm-spambase",
        width=1,
        aggregation="mean",
        objective=objective,
        defense=defense,
        optimizer="adam:lr=0.0001",
        attack=attack,
        epochs=epochs,
        batch_size=1028,
        test_fraction=0.3,
        evaluate_every=epochs,
        reproducible_noise=True,
        seed=seed,
        device="cpu",
    )


def main() -> None:
    """Print leak AUC of a batch and of gradients averaged over all epochs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{given.epochs} epochs, {given.seeds} seeds: a batch → all epochs\n")
    print(f"| method | test AUC | {' | '.join(SCORES)} |")
    print("|---|---|" + "---|" * len(SCORES))
    over = {each: f"stale:score={each.replace(':', ',')}" for each in SCORES}
    attack = ",".join([*over, *over.values()])
    for method in given.methods:
        documents = {}
        for seed in range(given.seeds):
            config = settings(method, seed, given.epochs, attack)
            with InProcessGrid(client_app, 2, config.to_run_config()) as grid:
                documents[str(seed)] = train(grid, config, "in-process", progress=False)
        leaks = largest_leaks(tables(documents)).groupby("attack")["leak"].mean()
        aucs = [document["final"]["test_auc"] for document in documents.values()]
        cells = [f"{statistics.fmean(aucs):.3f}"]
        cells += [f"{leaks[one]:.3f} → {leaks[all_]:.3f}" for one, all_ in over.items()]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
