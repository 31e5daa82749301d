"""Label privacy: what its bound costs, and what is found in spite of it.

    python benchmarks/label_privacy.py --part utility --dataset credit-default
    python benchmarks/label_privacy.py --part digits
    python benchmarks/label_privacy.py --part regression
    python benchmarks/label_privacy.py --part canaries
    python benchmarks/label_privacy.py --part together

``utility`` prints one line for no defense, for label privacy at several bounds, and for
Marvell, GAFM and LADSG: the bound for the whole training, the test metric, what the
stale attack finds at the party where it finds most, and how much of that is beyond what
the model's own predictions tell about the same rows. Means over the seeds, with the
standard error of the test metric. The settings of label privacy (loss, dropout,
number of epochs) are, for each mechanism, those with the best mean on the randomised
validation rows of other seeds, a quarter of the rows; test rows are not looked at.
Mechanisms are not compared in this way: their draws differ, by more than their results.

``canaries`` audits runs with a bound of 0.9, and one whose labels are drawn anew in
every epoch, which must exceed it.
``together`` compares one of eight parties with all of them. ``--workers`` runs at once.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any
from unittest import mock

import pandas as pd
import torch
from torch import Tensor

from flower_vfl.parties.imputation.label_imputer import BatchLabels
from flower_vfl.privacy.private_labels import PrivateLabels
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.objectives import preset
from flower_vfl.simulations.results import RUN, table, tables
from flower_vfl.simulations.runtime.engines import run_in_process
from flower_vfl.simulations.studies.run_metrics import largest_leaks, leaks, utilities

Settings = dict[str, Any]
EPOCHS = {
    "credit-default": (10, 20, 40),
    "spambase": (4, 8, 16),
    "digits": (10, 20, 40),
}
USUAL = {"credit-default": 20, "spambase": 16, "digits": 20}  # epochs of the others
SMALL = ({}, {"bottom": "mlp:hidden=64,dropout=0.5"})
MODELS = {
    "credit-default": (
        {},
        {"bottom": "mlp:hidden=128,dropout=0.3", "batch_size": 1024},
        {"bottom": "mlp:hidden=128,dropout=0.5", "batch_size": 1024},
    ),
    "spambase": SMALL,
    "digits": SMALL,
}
LOSSES = {
    "randomised-response": ("plain", "unbiased", "forward"),
    "gaussian": ("plain", "forward"),
}
RANGES = {"diabetes": "low=25,high=346", "boston": "low=5,high=50"}
OTHERS: dict[str, Settings] = {
    "none": {},
    "marvell:s=1": {"defense": "marvell:s=1"},
    "marvell:s=4": {"defense": "marvell:s=4"},
    "marvell:s=16": {"defense": "marvell:s=16"},
    "marvell:auc=0.75,over=run": {"defense": "marvell:auc=0.75,over=run,epochs=20"},
    "gafm": {"objective": "gafm", "width": 1, "aggregation": "mean"},
    "ladsg": preset("ladsg:epochs=50,first_epoch=vanilla,balanced=false"),
}


def one_run(config: RunConfig) -> dict[str, Any]:
    """Return the result of a run, in one thread and without a word."""
    logging.disable(logging.WARNING)
    return run_in_process(config, False, False)


def drawn_anew(config: RunConfig) -> dict[str, Any]:
    """Return the result of a run whose labels are drawn anew in every step."""
    count = iter(range(1_000_000_000))

    def batch(self: PrivateLabels, labels: BatchLabels, rows: Tensor) -> BatchLabels:
        assert self.mechanism is not None
        names = [f"{next(count)}" for _ in rows]
        true = self._known[rows]
        noisy = self.mechanism.randomise(true, names, self.key).to(true)
        return BatchLabels(noisy, noisy, true=true)

    with mock.patch.object(PrivateLabels, "batch", batch):
        return one_run(config)


def base(dataset: str, seed: int, **settings: Any) -> RunConfig:
    """Return the settings of a run; everything else is the default."""
    longest = EPOCHS.get(dataset, (20,))[-1]
    known = {"epochs": longest, **settings}
    return RunConfig(dataset=dataset, seed=seed, reproducible_noise=True, **known)


def tuned(
    pool: ProcessPoolExecutor, limit: str, mechanism: str, given: argparse.Namespace
) -> Settings:
    """Return the settings that the validation rows of other seeds choose."""
    text = f"{limit},mechanism={mechanism},loss="
    grid = [
        {**model, "label_dp": f"{text}{loss}"}
        for model, loss in product(MODELS[given.dataset], LOSSES[mechanism])
    ]
    seeds = range(100, 100 + given.tuning)
    held_out = {"valid_fraction": 0.25}  # one label of a row tells little
    runs = [{**each, **held_out, "seed": seed} for each in grid for seed in seeds]
    configs = [base(given.dataset, **each) for each in runs]
    found = tables({str(i): d for i, d in enumerate(pool.map(one_run, configs))})
    found = found.query("split == 'valid' and metric == @given.metric and step > 0")
    found = found[found["epoch"].isin(EPOCHS[given.dataset])]
    means = found.groupby([found[RUN].astype(int) // len(seeds), "epoch"])["value"]
    for (place, epoch), value in means.mean().items():
        print(f"  {grid[place]}, {epoch} epochs: valid {value:.4f}", flush=True)
    place, epoch = means.mean().idxmax()
    print(f"  chosen: {grid[place]}, {epoch} epochs", flush=True)
    return {**grid[place], "epochs": int(epoch)}


def show(name: str, bound: str, tests: pd.Series, found: pd.DataFrame) -> None:
    """Print one line of the table."""
    leak, beyond = f"{found['leak'].mean():.3f}", f"{found['beyond'].mean():+.3f}"
    error = tests.std() / len(tests) ** 0.5 if len(tests) > 1 else 0.0
    cells = f"{bound:>8}{tests.mean():>10.4f} ± {error:.4f}{leak:>8}{beyond:>9}"
    print(f"{name:<54}{cells}", flush=True)


def utility(pool: ProcessPoolExecutor, given: argparse.Namespace) -> None:
    """Print the table of one dataset."""
    dataset, seeds, metric = given.dataset, range(given.seeds), given.metric
    kinds = product(given.limits.split(";"), LOSSES)
    chosen = [tuned(pool, *kind, given) for kind in kinds]
    lines = {each["label_dp"]: each for each in chosen} | OTHERS
    print(f"{dataset:<54}{'bound':>8}{f'test {metric}':>19}{'stale':>8}{'beyond':>9}")
    for name, settings in lines.items():
        known = {"attack": "stale", "defense_at": "label", "epochs": USUAL[dataset]}
        known |= settings
        if name == "gafm" and dataset == "digits":
            known["width"] = 10  # one for each class
        configs = [base(dataset, seed, **known) for seed in seeds]
        documents = list(pool.map(one_run, configs))
        promised = documents[0]["label_privacy"]
        bound = f"{promised['auc_bound']:.3f}" if promised["auc_bound"] < 1 else "none"
        show(name, bound, _tests(documents), _stale(documents))


def _tests(documents: Iterable[Mapping[str, Any]]) -> pd.Series:
    return utilities(tables({str(i): d for i, d in enumerate(documents)}))["value"]


def _stale(documents: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    return largest_leaks(tables({str(i): d for i, d in enumerate(documents)}))


def regression(pool: ProcessPoolExecutor, given: argparse.Namespace) -> None:
    """Print Pearson's rho of two datasets over ε."""
    seeds = range(given.seeds)
    print(f"{'':<54}{'bound':>8}{'test rho':>19}{'stale':>8}{'beyond':>9}")
    for dataset, ends in RANGES.items():
        for epsilon in ("none", "8", "4", "2", "1", "0.5"):
            for loss in ("plain", "forward") if epsilon != "none" else ("",):
                text = f"epsilon={epsilon},{ends},loss={loss}" if loss else ""
                known = {"attack": "stale:score=direct", "label_dp": text, "epochs": 20}
                configs = [base(dataset, s, **known) for s in seeds]
                documents = list(pool.map(one_run, configs))
                bound = documents[0]["label_privacy"]["auc_bound"]
                name = f"{dataset}, epsilon {epsilon}, {loss or 'squared error'}"
                show(name, f"{bound:.3f}", _tests(documents), _stale(documents))


def canaries(pool: ProcessPoolExecutor, given: argparse.Namespace) -> None:
    """Print the audit of runs with a bound of 0.9."""
    known = {"epochs": 8, "label_dp": "auc=0.9,loss=plain", "canaries": 1500}
    runs = [base(given.dataset, s, attack="norm", **known) for s in range(given.audits)]
    print(f"{'':<22}{'bound':>8}{'AUC':>8}{'lower bound':>14}{'epsilon at least':>18}")
    over = 0
    for seed, document in enumerate(pool.map(one_run, runs)):
        over += _audited(f"seed {seed}", document) > 0.9
    print(f"{over} of {len(runs)} audits exceed the bound")
    _audited("drawn anew each epoch", drawn_anew(runs[0]))


def _audited(name: str, document: Mapping[str, Any]) -> float:
    found = table(document).sort_values("step")
    last = found[found["metric"].str.startswith("canary")].groupby("metric")["value"]
    auc, low, epsilon = (
        float(last.last()[f"canary_{key}"]) for key in ("auc", "auc_low", "epsilon")
    )
    print(f"{name:<22}{0.9:>8}{auc:>8.3f}{low:>14.3f}{epsilon:>18.2f}", flush=True)
    return low


def together(pool: ProcessPoolExecutor, given: argparse.Namespace) -> None:
    """Print what one of eight parties finds, and what all find together."""
    print(
        f"{'':<28}{'bound':>8}{'one party':>12}{'all':>8}{'model':>8}{'canaries':>10}"
    )
    for text in ("auc=0.9,loss=plain", "auc=0.75,loss=plain", "auc=0.65,loss=plain"):
        known = {"parties": 8, "coalitions": "all", "attack": "stale", "epochs": 8}
        configs = [
            base(given.dataset, s, label_dp=text, canaries=1500, **known)
            for s in range(given.seeds)
        ]
        documents = list(pool.map(one_run, configs))
        records = tables({str(i): d for i, d in enumerate(documents)})
        found = leaks(records)
        alone = found.query("not coalition").groupby(RUN)["leak"].max().mean()
        every = found.query("coalition").groupby(RUN)["leak"].max().mean()
        model = (found["leak"] - found["beyond"]).mean()
        canary = records.query("metric == 'canary_auc'").groupby(RUN)["value"].last()
        bound = documents[0]["label_privacy"]["auc_bound"]
        print(
            f"label-dp:{text:<19}{bound:>8.3f}{alone:>12.3f}{every:>8.3f}{model:>8.3f}"
            f"{canary.mean():>10.3f}",
            flush=True,
        )


def digits(pool: ProcessPoolExecutor, given: argparse.Namespace) -> None:
    """Print the table of ten classes."""
    limits = "epsilon=4;epsilon=2;epsilon=1"
    known = {"dataset": "digits", "limits": limits, "metric": "accuracy"}
    utility(pool, argparse.Namespace(**{**vars(given), **known}))


PARTS = {
    "utility": utility,
    "digits": digits,
    "regression": regression,
    "canaries": canaries,
    "together": together,
}


def main() -> None:
    """Print one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="utility")
    parser.add_argument("--dataset", default="spambase")
    parser.add_argument("--limits", default="auc=0.75;auc=0.65")
    parser.add_argument("--metric", default="auc")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tuning", type=int, default=5, help="seeds of validation")
    parser.add_argument("--audits", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ProcessPoolExecutor(given.workers) as pool:
        PARTS[given.part](pool, given)


if __name__ == "__main__":
    main()
