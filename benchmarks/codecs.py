"""Codecs and local updates: bytes of a step, test AUC and leak AUC, in one table each.

    python benchmarks/codecs.py
    python benchmarks/codecs.py --part local
    python benchmarks/codecs.py --part distance

``codecs`` prints one line for each pair of codecs, undefended and with Marvell: bytes
of a step and their ratio to float32, the test AUC after the last epoch with its
standard deviation over the seeds, and the mean over the steps of the leak AUC, or 1
minus it if that is larger, of the norm and the cosine attack at the party where it is
largest. ``local`` prints the test AUC after some
epochs, so after equally many exchanges, for several numbers of local steps. Nothing is
tuned: all runs have the default models and optimizers. ``distance`` prints the
validation AUC after each epoch, with which settings for ``wan.py`` were chosen.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import table
from flower_vfl.simulations.runtime.engines import run_in_process

DATA: dict[str, dict[str, Any]] = {
    "credit-default": {"epochs": 6, "batch_size": 1024},
    "spambase": {"epochs": 12, "batch_size": 256},
}
CODECS = [
    ("none", "none"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("int8", "none"),
    ("none", "int8"),
    ("int8", "int8"),
    ("none", "topk:keep=0.25,feedback=true"),
    ("none", "topk:keep=0.25"),
    ("topk:keep=0.25,feedback=true", "none"),
    ("topk:keep=0.25", "none"),
    ("int8", "topk:keep=0.1,feedback=true"),
]
DEFENSES = ("", "marvell:s=4")
LOCAL_STEPS, AFTER = (1, 2, 4), (1, 2, 4, 6)
DISTANCE = [  # pipeline, learning rate, embeddings, gradients
    (0, "0.005", "none", "none"),
    (0, "0.005", "int8", "int8"),
    (0, "0.005", "int4", "int4"),
    (0, "0.005", "int4", "int2"),
    (0, "0.005", "int2", "int2"),
    (1, "0.005", "none", "none"),
    (1, "0.0025", "int2", "int2"),
    (1, "0.0025", "int4", "lowrank"),
    (2, "0.005", "none", "none"),
    (2, "0.0025", "int4", "lowrank"),
    (3, "0.005", "none", "none"),
]


def run(dataset: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Return the result of one run."""
    given = {**DATA[dataset], "attack": "norm,cosine", "leak_every": 4, **settings}
    config = RunConfig(dataset=dataset, seed=seed, reproducible_noise=True, **given)
    return run_in_process(config, False, False)


def aucs_of(document: Mapping[str, Any], split: str = "test") -> pd.Series[float]:
    """Return the AUC after each epoch."""
    found = table(document).query("split == @split and metric == 'auc'")
    return found.set_index("epoch")["value"]


def leak(document: Mapping[str, Any], attack: str) -> float:
    """Return the mean leak AUC of an attack where it is largest."""
    found = table(document).query("metric == 'leak_flipped' and attack == @attack")
    return float(found.groupby("party")["value"].mean().max())


def codecs(names: Sequence[str], seeds: int) -> None:
    """Print the table of codecs."""
    print(
        "| dataset | defense | embeddings | gradients | bytes per step | ratio |",
        end="",
    )
    print(" test AUC | leak AUC, norm | leak AUC, cosine |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|")
    for dataset in names:
        for defense in DEFENSES:
            whole = 0.0
            for embeddings, gradients in CODECS:
                given = {"defense": defense, "defense_at": "label"}
                given |= {"evaluate_every": 100}  # at the end
                given |= {"compress_embeddings": embeddings}
                given |= {"compress_gradients": gradients}
                found = [run(dataset, seed, **given) for seed in range(seeds)]
                size = found[0]["bytes"]["step"]
                whole = whole or size
                aucs = pd.Series([aucs_of(each).iloc[-1] for each in found])
                leaks = [
                    sum(leak(each, attack) for each in found) / seeds
                    for attack in ("norm", "cosine")
                ]
                line = (
                    f"| {dataset} | {defense or 'none'} | {embeddings} | {gradients} "
                )
                line += f"| {size:,.0f} | {size / whole:.2f} | {aucs.mean():.4f} ± "
                line += f"{aucs.std():.4f} | {leaks[0]:.3f} | {leaks[1]:.3f} |"
                print(line, flush=True)


def local(names: Sequence[str], seeds: int) -> None:
    """Print the table of local updates."""
    print(
        "| dataset | local steps | "
        + " | ".join(f"{e} epoch{'s' * (e > 1)}" for e in AFTER),
        end="",
    )
    print(" | leak AUC, norm |")
    print("|---|---:" + "|---:" * len(AFTER) + "|---:|")
    for dataset in names:
        for steps in LOCAL_STEPS:
            given = {"local_steps": steps, "epochs": AFTER[-1]}
            found = [run(dataset, seed, **given) for seed in range(seeds)]
            aucs = pd.DataFrame([aucs_of(each) for each in found]).mean()
            shown = " | ".join(f"{aucs[epoch]:.4f}" for epoch in AFTER)
            norm = sum(leak(each, "norm") for each in found) / seeds
            print(f"| {dataset} | {steps} | {shown} | {norm:.3f} |", flush=True)


def distance(names: Sequence[str], seeds: int) -> None:
    """Print the table of settings for a distance, on validation rows."""
    print(
        "| pipeline | learning rate | embeddings | gradients | AUC after each epoch |"
    )
    print("|---:|---:|---|---|---|")
    for dataset in names:
        for pipeline, rate, embeddings, gradients in DISTANCE:
            given = {"pipeline": pipeline, "learning_rate": rate, "width": 128}
            given |= {"compress_embeddings": embeddings, "valid_fraction": 0.2}
            given |= {"compress_gradients": gradients, "leak_every": 1000}
            found = [run(dataset, 100 + seed, **given) for seed in range(seeds)]
            aucs = pd.DataFrame([aucs_of(each, "valid") for each in found]).mean()
            shown = " | ".join(f"{auc:.4f}" for auc in aucs)
            line = f"| {pipeline} | {rate} | {embeddings} | {gradients} | {shown} |"
            print(line, flush=True)


PARTS = {"codecs": codecs, "local": local, "distance": distance}


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="codecs")
    parser.add_argument("--dataset", choices=DATA, action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    PARTS[given.part](given.dataset or [*DATA], given.seeds)


if __name__ == "__main__":
    main()
