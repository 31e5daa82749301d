"""The stale-gradient attack: leak AUC of one batch beside that of many epochs.

A passive party that keeps every gradient of every example, and averages them before it
scores, takes off noise that is drawn anew in each epoch. One line for each defense,
mean over the seeds, at the first of two parties: the main test metric; for each attack
the mean leak AUC over the batches, and that of the examples' mean gradients after all
epochs, each batch divided by its root mean square.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from flower_vfl import in_process
from flower_vfl.leakage.attacks import LeakageMeter, StaleGradients
from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.parties.label import LabelParty
from flower_vfl.randomness import RandomState, derive_seed
from flower_vfl.records import Measurement
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import load_rows, make_label, make_passive
from flower_vfl.strategies import Defense, NoDefense, VerticalStrategy, build_defense
from flower_vfl.transform import Batch

DEFENSES = ("none", "iso:t=4", "max-norm", "marvell:s=4", "marvell:auc=0.6")
ATTACKS = ("norm", "cosine", "mean:held_out=true")
PARTY = "passive-1"


class Recorder(NoDefense):
    """Stands behind the defense and sees what leaves."""

    def __init__(self, label: LabelParty) -> None:
        assert label.raw_labels is not None
        self.label, self.truth = label, label.raw_labels.double()
        self.stale = StaleGradients(len(self.truth), normalize=True)
        self.meter = LeakageMeter(ATTACKS)
        self.measured: list[Measurement] = []
        self.index = {0: 0}  # by epoch: batches seen

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        """Keep what the first party gets."""
        if batch.party == PARTY:
            number = self.index.get(batch.epoch, 0)
            self.index[batch.epoch] = number + 1
            rows = self.label.configured().training_batches(batch.epoch)[number]
            self.stale.add(rows, gradient)
            given = {PARTY: gradient}
            self.measured += self.meter.measure(given, self.truth[rows], batch.step)
        return gradient


def one_run(config: RunConfig) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the test metric, and leak AUC by attack: of a batch, of all epochs."""
    parties: list[Any] = []
    for index in range(config.parties + 1):
        name = f"passive-{index}" if index else "label"
        with RandomState(derive_seed(config.seed, "model", name)):
            rows = load_rows(config, index)
            parties.append((make_passive if index else make_label)(config, rows))
    label = parties[0]
    label.trust_server = True
    recorder = Recorder(label)
    strategy = VerticalStrategy(
        batch_size=config.batch_size,
        seed=config.seed,
        evaluate_every=config.epochs,
        progress=False,
        defense=Defense(
            [build_defense(config.defense), recorder], noise_seed=config.seed
        ),
    )
    with in_process(parties) as grid:
        result = strategy.start(grid, num_rounds=config.epochs)
    final = result.evaluate_metrics_clientapp[config.epochs]
    names = [f"test_{name}" for name in MAIN_METRIC.values()]
    score = next(float(final[name]) for name in names if name in final)  # type: ignore[arg-type]
    table = pd.DataFrame(recorder.measured).query("metric == 'leak'")
    each = table.groupby("attack")["value"].mean()
    averaged = recorder.stale.leak(ATTACKS, recorder.truth)
    return score, {a: (float(each[a]), averaged[a]) for a in ATTACKS}


def main() -> None:
    """Print one line per defense."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="spambase")
    parser.add_argument("--defenses", default=";".join(DEFENSES), help="joined by ;")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    print(f"{given.dataset}, {given.epochs} epochs, {given.seeds} seeds\n")
    print(f"| defense | test | {' | '.join(ATTACKS)} |")
    print("|---|---|" + "---|" * len(ATTACKS))
    for defense in given.defenses.split(";"):
        runs = []
        for seed in range(given.seeds):
            config = RunConfig(
                dataset=given.dataset, defense=defense, epochs=given.epochs, seed=seed
            )
            runs.append(one_run(config))
        cells = [f"`{defense}`", f"{statistics.mean(r[0] for r in runs):.3f}"]
        for attack in ATTACKS:
            pairs = [run[1][attack] for run in runs]
            means = [statistics.mean(values) for values in zip(*pairs, strict=True)]
            cells.append(f"{means[0]:.3f} → {means[1]:.3f}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
