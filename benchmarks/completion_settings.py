"""How LADSG's tables complete a model: settings of the attack, on validation rows.

For each dataset of LADSG's Table 4 a model without a defense is trained with the
settings of the table, on seeds from 100 on. One eighth of its training rows is left out
as validation rows; test rows are not used. One line for each setting of the attack:
success on training rows whose labels the attacker was not given, and on validation
rows, mean over the seeds, and what the known labels alone give on the former.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from dataclasses import replace

import torch
from victims import complete, train

from flower_vfl.parties.schedule import VALID
from flower_vfl.simulations.attacks import COMPLETIONS
from flower_vfl.simulations.papers.experiments import load_experiment
from flower_vfl.specs import build_from_spec

FIRST_SEED = 100
FROZEN, FLIP = "freeze_bottom=true,", "flip=true,"
ONCE = f"{FROZEN}mix_inputs=false,"
IMAGES = (
    f"{ONCE}steps=256",
    f"{ONCE}steps=5120",
    f"{FROZEN}{FLIP}steps=256",
    f"{FLIP}steps=256",
    f"{FLIP}steps=5120",
)
TABLES = (
    f"{FROZEN}lambda_u=5,steps=512",
    *(f"{ONCE}lambda_u={u},steps={n}" for u in (5, 20) for n in (256, 512)),
    "lambda_u=5,steps=512",
)
METRICS = {"Yahoo": "accuracy"}


def main() -> None:
    """Print one line for each dataset and setting."""
    table = load_experiment("ladsg-table-4")
    configs = {
        row.labels[0]: row.config
        for row in table.rows
        if row.labels[1] == "none" and row.config is not None
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="*", default=list(configs), choices=configs)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--settings", nargs="+", help="default: those of this file")
    for name in ("bottom", "optimizer"):
        parser.add_argument(f"--{name}", help="instead of the table's")
    for name in ("epochs", "limit"):
        parser.add_argument(f"--{name}", type=int, help="instead of the table's")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    for name in arguments.datasets:
        config = replace(configs[name], valid_fraction=0.125, attack="", capture=0)
        for key in ("bottom", "optimizer", "epochs", "limit"):
            given = getattr(arguments, key)
            config = replace(config, **({key: given} if given else {}))
        labels = configs[name].attack.partition("labels=")[2].partition(",")[0]
        settings = IMAGES if name in ("CIFAR-10", "BHI") else TABLES
        seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
        models = [train(replace(config, seed=seed)) for seed in seeds]
        for setting in arguments.settings or settings:
            text = f"passive:labels={labels},metric={METRICS.get(name, 'auto')}"
            attack = build_from_spec("attack", f"{text},{setting}", COMPLETIONS)
            found = [
                complete(attack, model, model.attacker.model, seed, VALID)
                for model, seed in zip(models, seeds, strict=True)
            ]
            train_rows = statistics.mean(each.train_success for each in found)
            valid = statistics.mean(each.test_success or 0.0 for each in found)
            alone = statistics.mean(each.baseline_train_success for each in found)
            print(
                f"| {name} | {setting} | {train_rows:.3f} | {valid:.3f} "
                f"| {alone:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
