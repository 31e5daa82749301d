"""GAFM beside Tables 2, 4 and 11 of its paper, in the paper's settings.

One line per method: test AUC (mean ± standard deviation over the seeds, worst, best)
and the flipped leak AUC of the norm, mean and median attack, each followed by what the
paper prints. Leak AUC is the mean over the parties and the batches of the last epoch;
``--leak-over all`` takes the batches of all epochs. The paper does not say which of the
two it means, nor which noise its Marvell has. The cases are Spambase with one passive
party (Table 2) and with three (Table 4), IMDB on its official split and the Criteo
sample (Tables 2 and 11), and credit default, which is not in the paper, as Spambase. At
the end of a case stand the targets of this project, and whether they were met.

``--stale`` measures something else instead: soft scores on every batch of all epochs,
and the same attacks on each example's gradient averaged over the epochs, at the party
that they tell most.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.leakage.monitor import FLIPPED
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import table, tables
from flower_vfl.simulations.studies.run_metrics import largest_leaks

ATTACKS = {"norm": "norm", "mean": "mean:hard=true", "median": "median:hard=true"}
SOFT = ("norm", "cosine", "mean:held_out=true")  # with --stale, of batches and epochs
# What is added to GAFM's parameters (None: no GAFM), and the defense.
METHODS: dict[str, tuple[str | None, str]] = {
    "GAFM": ("", ""),
    "Marvell": (None, "marvell:s=4"),
    "Max Norm": (None, "max-norm"),
    "Vanilla": (None, ""),
    "GAN-only": (",parts=gan", ""),
    "CE-only": (",parts=ce", ""),
    "GAFM + Marvell": ("", "marvell:s=4"),
}
MARVELL_SPAMBASE = ["0.71 (0.59 0.82)", "0.53±0.02", "0.70±0.01", "0.70±0.01"]
Scores = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A dataset with the paper's settings (appendix E) and results.

    Parameters
    ----------
    dataset, bottom : str
        Names in this project.
    delta : float
        Δ; γ is 1.
    parties : int (default: 1)
        Passive parties.
    epochs, batch : int (default: 300, 1028)
        Training.
    test : float (default: 0.3)
        Share of test rows, where there is no official split.
    paper : dict[str, list[str]] (default: {})
        Test AUC as average (worst best) or mean ± sd; leak AUC as mean ± sd.
    """

    dataset: str
    bottom: str
    delta: float
    parties: int = 1
    epochs: int = 300
    batch: int = 1028
    test: float = 0.3
    paper: dict[str, list[str]] = field(default_factory=dict)


CASES = {
    "spambase": Case(
        "spambase",
        "gafm-spambase",
        0.05,
        paper={
            "GAFM": ["0.93 (0.91 0.95)", "0.56±0.04", "0.67±0.05", "0.66±0.05"],
            "Marvell": MARVELL_SPAMBASE,
            "Max Norm": ["0.95 (0.95 0.95)", "0.83±0.11", "1.00±0.00", "0.91±0.00"],
            "Vanilla": ["0.95 (0.95 0.96)", "0.85±0.07", "1.00±0.00", "0.91±0.00"],
        },
    ),
    "spambase-3": Case(
        "spambase",
        "gafm-spambase",
        0.05,
        parties=3,
        paper={
            "GAFM": ["0.86±0.15", "0.60±0.07", "0.69±0.06", "0.68±0.07"],
            "Marvell": ["0.68±0.06", "0.53±0.03", "0.70±0.02", "0.70±0.02"],
            "Max Norm": ["0.95±0.00", "0.83±0.11", "0.99±0.02", "0.99±0.04"],
            "Vanilla": ["0.95±0.00", "0.84±0.13", "1.00±0.00", "1.00±0.00"],
        },
    ),
    "imdb": Case(
        "imdb",
        "gafm-imdb",
        0.1,
        paper={
            "GAFM": ["0.88 (0.88 0.89)", "0.52±0.01", "0.60±0.01", "0.60±0.01"],
            "Marvell": ["0.80 (0.71 0.89)", "0.52±0.01", "0.73±0.01", "0.73±0.01"],
            "Max Norm": ["0.89 (0.89 0.90)", "0.82±0.09", "1.00±0.00", "0.99±0.01"],
            "Vanilla": ["0.89 (0.89 0.90)", "0.82±0.09", "1.00±0.00", "0.99±0.01"],
        },
    ),
    "criteo": Case(
        "criteo",
        "gafm-wide-deep",
        0.5,
        epochs=100,
        batch=256,
        test=0.2,
        paper={
            "GAFM": ["0.67 (0.64 0.73)", "0.68±0.06", "0.80±0.09", "0.77±0.05"],
            "Marvell": ["0.70 (0.65 0.76)", "0.76±0.08", "0.86±0.08", "0.78±0.04"],
            "Max Norm": ["0.69 (0.65 0.72)", "0.92±0.01", "0.83±0.09", "0.82±0.00"],
            "Vanilla": ["0.72 (0.69 0.77)", "0.92±0.06", "0.91±0.11", "0.82±0.00"],
            "GAFM + Marvell": [
                "0.64 (0.62 0.65)",
                "0.60±0.02",
                "0.66±0.01",
                "0.65±0.01",
            ],
        },
    ),
    "credit-default": Case("credit-default", "gafm-spambase", 0.05),
}


def settings(case: Case, method: str, seed: int, epochs: int) -> RunConfig:
    """Return the settings of one run."""
    added, defense = METHODS[method]
    gafm = f"gafm:delta={case.delta},gamma=1{added}"
    return RunConfig(
        dataset=case.dataset,
        parties=case.parties,
        bottom=case.bottom,
        width=1,
        aggregation="mean",
        objective="auto" if added is None else gafm,
        defense=defense,
        optimizer="adam:lr=0.0001",
        attack=",".join(ATTACKS.values()),
        epochs=epochs,
        batch_size=case.batch,
        test_fraction=case.test,
        evaluate_every=epochs,
        reproducible_noise=True,
        seed=seed,
        device="cpu",
    )


def run(name: str, method: str, epochs: int, seed: int) -> Scores:
    """Return test AUC and leak AUCs (last epoch, all epochs) of one run."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    config = settings(CASES[name], method, seed, epochs)
    with InProcessGrid(client_app, config.parties + 1, config.to_run_config()) as grid:
        document = train(grid, config, "in-process", progress=False)
    records = table(document)
    leaks = records[records["metric"] == FLIPPED]
    last = leaks[leaks["epoch"] == epochs].groupby("attack")["value"].mean()
    means = leaks.groupby("attack")["value"].mean()
    return {
        "auc": document["final"]["test_auc"],
        **{name: float(last[text]) for name, text in ATTACKS.items()},
        **{f"{name}/all": float(means[text]) for name, text in ATTACKS.items()},
    }


def spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f}±{deviation:.3f}"


def line(case: Case, method: str, runs: Sequence[Scores], suffix: str) -> str:
    """Return a method's row of the table, with the paper's numbers behind ours."""
    aucs = [scores["auc"] for scores in runs]
    ours = [f"{spread(aucs)}, {min(aucs):.3f} to {max(aucs):.3f}"]
    ours += [spread([scores[name + suffix] for scores in runs]) for name in ATTACKS]
    paper = case.paper.get(method, ["-"] * len(ours))
    cells = [f"{a} [{b}]" for a, b in zip(ours, paper, strict=True)]
    return f"| {method} | {len(runs)} | {' | '.join(cells)} |"


def targets(
    found: Mapping[str, Sequence[Scores]], suffix: str, spambase: bool
) -> list[tuple[str, float, bool]]:
    """Return what this project set out to reach, and whether it did."""
    mean = {
        method: {
            name: statistics.fmean(scores[key] for scores in runs)
            for name, key in (("auc", "auc"), *((n, n + suffix) for n in ATTACKS))
        }
        for method, runs in found.items()
    }
    listed: list[tuple[str, float, bool]] = []

    def at_least(text: str, value: float, bound: float) -> None:
        listed.append((f"{text}, at least {bound:g}", value, value >= bound))

    def above(high: str, low: str, *names: str) -> None:
        for name in names:
            gap = mean[high][name] - mean[low][name]
            what = "test AUC" if name == "auc" else f"{name} attack"
            listed.append((f"{low}: {what} below that of {high}", gap, gap > 0.0))

    if {"GAFM", "Vanilla"} <= mean.keys():
        vanilla, gafm = mean["Vanilla"], mean["GAFM"]
        if spambase:
            at_least("Vanilla: test AUC", vanilla["auc"], 0.94)
            at_least("GAFM: test AUC", gafm["auc"], 0.92)
        at_least("Vanilla: mean attack", vanilla["mean"], 0.99)
        at_least("GAFM: test AUC less Vanilla's", gafm["auc"] - vanilla["auc"], -0.03)
        for name in ("mean", "median"):
            drop = vanilla[name] - gafm[name]
            at_least(f"GAFM: {name} attack below Vanilla's", drop, 0.25)
    if {"GAFM", "GAN-only", "CE-only"} <= mean.keys():
        above("GAFM", "GAN-only", "auc", "mean", "median")
        above("CE-only", "GAFM", "mean", "median")
    if {"GAFM", "Marvell", "GAFM + Marvell"} <= mean.keys():
        for other in ("GAFM", "Marvell"):
            above(other, "GAFM + Marvell", *ATTACKS)
    return listed


def print_stale(name: str, methods: Sequence[str], seeds: int, epochs: int) -> None:
    """Print leak AUC of a batch and of gradients averaged over all epochs."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{name}, {epochs} epochs, {seeds} seeds: a batch → all epochs\n")
    print(f"| method | test AUC | {' | '.join(SOFT)} |")
    print("|---|---|" + "---|" * len(SOFT))
    over = {each: f"stale:score={each.replace(':', ',')}" for each in SOFT}
    for method in methods:
        documents = {}
        for seed in range(seeds):
            config = settings(CASES[name], method, seed, epochs)
            config = replace(config, attack=",".join([*over, *over.values()]))
            given = client_app, config.parties + 1, config.to_run_config()
            with InProcessGrid(*given) as grid:
                documents[str(seed)] = train(grid, config, "in-process", progress=False)
        leaks = largest_leaks(tables(documents)).groupby("attack")["leak"].mean()
        aucs = [document["final"]["test_auc"] for document in documents.values()]
        cells = [f"{statistics.fmean(aucs):.3f}"]
        cells += [f"{leaks[one]:.3f} → {leaks[all_]:.3f}" for one, all_ in over.items()]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--epochs", type=int, help="instead of the paper's")
    parser.add_argument(
        "--quick", action="store_true", help="2 seeds, GAFM and Vanilla"
    )
    parser.add_argument(
        "--cases", nargs="+", default=["spambase", "spambase-3"], choices=CASES
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--leak-over", choices=["last", "all"], default="last")
    parser.add_argument("--stale", action="store_true", help="average over epochs")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--json", help="file for the numbers of every run")
    return parser.parse_args()


def main() -> None:
    """Run every method with every seed and print the tables as Markdown."""
    arguments = parse()
    seeds = 2 if arguments.quick else arguments.seeds
    methods = ["GAFM", "Vanilla"] if arguments.quick else arguments.methods
    suffix = "/all" if arguments.leak_over == "all" else ""
    if arguments.stale:
        for name in arguments.cases:
            epochs = arguments.epochs or CASES[name].epochs
            print_stale(name, methods, seeds, epochs)
        return
    everything: dict[str, dict[str, list[Scores]]] = {}
    # A forked process would share the threads of torch and gRPC.
    pool = ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn"))
    with pool:
        for name in arguments.cases:
            case, found = CASES[name], everything.setdefault(name, {})
            epochs = arguments.epochs or case.epochs
            print(f"{name}, {epochs} epochs: ours [paper]\n")
            print("| method | seeds | test AUC | norm | mean | median |")
            print("|---|---|---|---|---|---|", flush=True)
            for method in methods:
                job = partial(run, name, method, epochs)
                found[method] = list(pool.map(job, range(seeds)))
                print(line(case, method, found[method], suffix), flush=True)
                if arguments.json:
                    Path(arguments.json).write_text(json.dumps(everything, indent=1))
            print()
            for text, value, met in targets(found, suffix, case.dataset == "spambase"):
                print(f"{text}: {value:.3f} {'met' if met else 'MISSED'}")
            print()


if __name__ == "__main__":
    main()
