"""Is LADSG's attack success the lowest of all defenses at equal utility.

Reads the saved results of LADSG's Figure 3 (``flower-vfl reproduce ladsg-figure-3``)
and runs nothing. For each dataset and each strength of LADSG it prints, for every other
defense, its lowest success among the strengths that have at least LADSG's utility, less
``--slack``, means over the seeds, with the standard error of the difference over the
seeds; ``-`` where no strength has it. "No defense" is among the strengths of each, so
that a defense which only costs utility is as good as none.

The last column is the area under the curve of privacy, 1 minus the success scaled from
what the known labels alone give (0) to a success of 1, and utility, scaled from a guess
to 1 (`flower_vfl.simulations.studies.tradeoff.area`).
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

from flower_vfl.simulations.papers.experiments import load_experiment
from flower_vfl.simulations.papers.reproduce import saved_results
from flower_vfl.simulations.studies.tradeoff import area

OTHERS = ("GC", "NG", "MG", "PPDL")
GUESS = {"AG News": 0.25}  # utility of a guess; an AUC of 0.5 for two classes


def beside(own: pd.DataFrame, other: pd.DataFrame) -> str:
    """Return a success, and how much higher it is than LADSG's for the same seeds."""
    apart = (other["success"] - own["success"]).to_numpy()
    error = apart.std(ddof=1) / np.sqrt(len(apart))
    return f"{other['success'].mean():.3f} ({apart.mean():+.3f} ± {error:.3f})"


def areas(points: pd.DataFrame, guess: float) -> dict[str, float]:
    """Return the area under the curve of each defense."""
    alone = points["known labels alone"].mean()
    privacy = (1.0 - (points["success"] - alone) / (1.0 - alone)).clip(0.0, 1.0)
    utility = ((points["utility"] - guess) / (1.0 - guess)).clip(0.0, 1.0)
    names = points.index.str.split().str[0]
    return {
        name: area(list(zip(privacy[mine], utility[mine], strict=True)))
        for name in (*OTHERS, "LADSG")
        if (mine := (names == name) | (names == "none")).any()
    }


def main() -> None:
    """Print a table for each dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slack", type=float, default=0.005, help="of the utility")
    slack = parser.parse_args().slack
    frame = saved_results(load_experiment("ladsg-figure-3"))
    for dataset, rows in frame.groupby("dataset", sort=False):
        means = rows.groupby("strength", sort=False).mean(numeric_only=True)
        seeds = {name: own.set_index("seed") for name, own in rows.groupby("strength")}
        print(f"\n| {dataset} | utility | success | {' | '.join(OTHERS)} |")
        print("|---" * (len(OTHERS) + 3) + "|")
        for name, own in means[means.index.str.startswith("LADSG")].iterrows():
            cells = []
            for other in OTHERS:
                known = means[means.index.str.startswith((other, "none"))]
                equal = known[known["utility"] >= own["utility"] - slack]
                best = equal["success"].idxmin() if len(equal) else None
                text = "-" if best is None else beside(seeds[name], seeds[best])
                cells.append(f"{text} {best or ''}".strip())
            head = f"| {name} | {own['utility']:.3f} | {own['success']:.3f} "
            print(f"{head}| {' | '.join(cells)} |")
        found = areas(means, GUESS.get(str(dataset), 0.5))
        ranked = sorted(found.items(), key=lambda item: -item[1])
        print("areas:", ", ".join(f"{name} {value:.3f}" for name, value in ranked))


if __name__ == "__main__":
    main()
