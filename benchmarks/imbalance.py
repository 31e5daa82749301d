"""Default methods of ``compare`` where one class is rare, and where it is not.

    python benchmarks/imbalance.py
    python benchmarks/imbalance.py --data loan,credit-default --seeds 5 --before

Prints a Markdown table for every dataset: test AUC (accuracy for several classes) as
mean (worst, best) over the seeds, its difference from no defense, and the leak AUC of
four attacks, mean over all batches at the party that learns most. ``loan`` is a
generated table with 5 % positives whose label party has columns of its own.
``--before`` adds gradient compression, GAFM and LADSG as in their papers; ``--methods``
takes others. ``--valid``
prints metrics of validation rows instead of test rows; defaults were chosen by those of
``loan``, ``breast-cancer`` and ``credit-default``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pandas as pd

from flower_vfl.simulations.cli.compare import DEFAULTS
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.printing import markdown_table
from flower_vfl.simulations.results import tables
from flower_vfl.simulations.runtime.engines import run_in_process
from flower_vfl.simulations.studies.methods import parse_method
from flower_vfl.simulations.studies.run_metrics import largest_leaks
from flower_vfl.simulations.studies.trials import task_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from loan_cases import loan_config

ATTACKS = ("norm", "cosine", "mean", "median")
ROWS = {"give-me-some-credit": 12000, "adult": 8000, "credit-default": 8000}
DATA = "loan,credit-default,breast-cancer,give-me-some-credit,adult,spambase,digits"
BEFORE = (
    "gc:keep=0.1",
    "gafm:gamma=1,balanced=false",
    "ladsg:epochs=50,first_epoch=vanilla,balanced=false",
)


def settings(name: str, folder: Path) -> RunConfig:
    """Return the settings of a run without a defense."""
    config = RunConfig(dataset=name, limit=ROWS.get(name, 0), reproducible_noise=True)
    config = loan_config(folder) if name == "loan" else config
    return replace(config, evaluate_every=config.epochs, valid_fraction=0.2)


def one_run(run: tuple[str, RunConfig, str]) -> dict[str, float]:
    """Return the utility of a run and what each attack found."""
    metric, config, split = run
    chosen = f"split == '{split}' and metric == '{metric}' and step > 0"
    logging.disable(logging.WARNING)
    records = tables({"": run_in_process(config, False, False)})
    found = records.query(chosen)
    leaks = largest_leaks(records).set_index("attack")["leak"].astype(float)
    return {"utility": float(found["value"].iloc[-1]), **leaks.to_dict()}


def lines(
    name: str, folder: Path, pool: ProcessPoolExecutor, given: argparse.Namespace
) -> Iterator[list[str]]:
    """Yield a line for each method."""
    config = settings(name, folder)
    task = task_of(config)
    attacks = ATTACKS if task == "binary" else ("norm", "direct")
    metric = "auc" if task == "binary" else "accuracy"
    vanilla = float("nan")
    methods = given.methods or [*DEFAULTS[task], *(BEFORE if given.before else ())]
    for method in methods:
        if task != "binary" and "gafm" in method:
            continue  # it needs a column for each class
        one = replace(parse_method(method).over(config, {}), attack=",".join(attacks))
        split = "valid" if given.valid else "test"
        runs = [(metric, replace(one, seed=s), split) for s in range(given.seeds)]
        found = pd.DataFrame(pool.map(one_run, runs))
        own = found["utility"]
        vanilla = own.mean() if method == "none" else vanilla
        spread = f"{own.mean():.3f} ({own.min():.2f}, {own.max():.2f})"
        leaks = [f"{found[n].mean():.2f}" if n in found else "" for n in ATTACKS]
        yield [name, f"`{method}`", spread, f"{own.mean() - vanilla:+.3f}", *leaks]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--valid", action="store_true")
    parser.add_argument("--methods", nargs="*")
    given = parser.parse_args()
    heads = ["data", "method", "utility", "change", *ATTACKS]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.workers) as pool,
    ):
        for name in given.data.split(","):
            print(markdown_table(heads, list(lines(name, Path(folder), pool, given))))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
