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
standard error of the test metric. The settings of label privacy (mechanism, loss,
dropout, number of epochs) are those with the best mean over the seeds on randomised
validation rows; test rows are not looked at. ``canaries`` audits runs with a bound of
0.9, and one whose labels are drawn anew in every epoch, which must exceed it.
``together`` compares one of eight parties with all of them. ``--workers`` runs at once.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any
from unittest import mock

import pandas as pd
import torch
from torch import Tensor

from flower_vfl.parties.imputation.label_imputer import BatchLabels
from flower_vfl.privacy.label_privacy import PrivateLabels
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.objectives import preset
from flower_vfl.simulations.results import RUN, table, tables
from flower_vfl.simulations.runtime.engines import run_in_process
from flower_vfl.simulations.studies.run_metrics import largest_leaks, leaks, utilities

EPOCHS = {"credit-default": 16, "spambase": 16, "digits": 40}
MODELS = ("auto", "mlp:hidden=64,dropout=0.5")
KINDS = (
    "loss=plain",
    "loss=unbiased",
    "loss=forward",
    "mechanism=gaussian,loss=plain",
    "mechanism=gaussian,loss=forward",
)
RANGES = {"diabetes": "low=25,high=346", "boston": "low=5,high=50"}
OTHERS: dict[str, dict[str, str]] = {
    "none": {},
    "marvell:s=1": {"defense": "marvell:s=1"},
    "marvell:s=4": {"defense": "marvell:s=4"},
    "marvell:s=16": {"defense": "marvell:s=16"},
    "marvell:auc=0.75,over=run": {"defense": "marvell:auc=0.75,over=run,epochs=16"},
    "gafm": {"objective": "gafm", "width": "1", "aggregation": "mean"},
    "ladsg": preset("ladsg"),
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
    known = {"epochs": EPOCHS.get(dataset, 20), "valid_fraction": 0.1, **settings}
    return RunConfig(dataset=dataset, seed=seed, reproducible_noise=True, **known)


def curves(documents: Sequence[Mapping[str, Any]], metric: str) -> pd.DataFrame:
    """Return a metric of validation and test rows by epoch, one column per run."""
    found = tables({str(i): d for i, d in enumerate(documents)})
    found = found.query("metric == @metric and step > 0 and party == ''")
    return found.pivot_table(index="epoch", columns=["split", RUN], values="value")


def tuned(
    pool: ProcessPoolExecutor, dataset: str, limit: str, seeds: Sequence[int], name: str
) -> tuple[dict[str, Any], pd.Series]:
    """Return the settings that validation rows choose, and the test metric by seed."""
    grid = list(product(MODELS if dataset != "digits" else MODELS[:1], KINDS))
    given = [
        {"bottom": model, "label_dp": f"{limit},{kind}", "evaluate_every": 1}
        for model, kind in grid
    ]
    configs = [base(dataset, seed, **each) for each in given for seed in seeds]
    documents = list(pool.map(one_run, configs))
    best: tuple[float, dict[str, Any], pd.Series] | None = None
    for i, each in enumerate(given):
        own = curves(documents[i * len(seeds) : (i + 1) * len(seeds)], name)
        mean = own["valid"].mean(axis=1)
        epoch = int(mean.idxmax())
        print(
            f"  {limit}, {each['bottom']}, {each['label_dp'].partition(',')[2]}: "
            f"{epoch} epochs, valid {mean[epoch]:.4f}",
            flush=True,
        )
        if best is None or mean[epoch] > best[0]:
            settings = {**each, "epochs": epoch}
            best = float(mean[epoch]), settings, own["test"].loc[epoch]
    assert best is not None
    return best[1], best[2]


def show(name: str, bound: str, tests: pd.Series, found: pd.DataFrame | None) -> None:
    """Print one line of the table."""
    leak, beyond = ("", "") if found is None else _means(found)
    error = tests.std() / len(tests) ** 0.5 if len(tests) > 1 else 0.0
    cells = f"{bound:>8}{tests.mean():>10.4f} ± {error:.4f}{leak:>10}{beyond:>10}"
    print(f"{name:<34}{cells}", flush=True)


def _means(found: pd.DataFrame) -> tuple[str, str]:
    return f"{found['leak'].mean():.3f}", f"{found['beyond'].mean():+.3f}"


def utility(pool: ProcessPoolExecutor, given: argparse.Namespace) -> None:
    """Print the table of one dataset."""
    dataset, seeds, metric = given.dataset, range(given.seeds), given.metric
    rows = []
    for limit in given.limits.split(";"):
        settings, tests = tuned(pool, dataset, limit, seeds, metric)
        configs = [base(dataset, s, attack="stale", **settings) for s in seeds]
        documents = list(pool.map(one_run, configs))
        shown = f"label-dp:{settings['label_dp']}"
        print(f"  chosen: {settings}")
        rows.append((shown, documents, tests))
    print(f"{dataset:<34}{'bound':>8}{f'test {metric}':>19}{'stale':>10}{'beyond':>10}")
    for shown, documents, tests in rows:
        bound = f"{documents[0]['label_privacy']['auc_bound']:.3f}"
        show(shown, bound, tests, _stale(documents))
    for name, settings in OTHERS.items():
        typed = {k: int(v) if k == "width" else v for k, v in settings.items()}
        known = {"attack": "stale", "defense_at": "label", **typed}
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
    print(f"{'':<34}{'bound':>8}{'test rho':>19}{'stale':>10}{'beyond':>10}")
    for dataset, ends in RANGES.items():
        for epsilon in ("none", "8", "4", "2", "1", "0.5"):
            for loss in ("plain", "forward") if epsilon != "none" else ("",):
                text = f"epsilon={epsilon},{ends},loss={loss}" if loss else ""
                known = {"attack": "stale:score=direct", "label_dp": text}
                configs = [base(dataset, s, epochs=20, **known) for s in seeds]
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
    parser.add_argument("--audits", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ProcessPoolExecutor(given.workers) as pool:
        PARTS[given.part](pool, given)


if __name__ == "__main__":
    main()
