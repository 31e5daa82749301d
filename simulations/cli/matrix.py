"""``flower-vfl matrix``: tuned defenses, ranked by attacks on several datasets."""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.printing import text_table
from flower_vfl.simulations.results import read_json, write_whole
from flower_vfl.simulations.studies.benchmark import benchmark_page
from flower_vfl.simulations.studies.methods import VANILLA
from flower_vfl.simulations.studies.study import STUDY_FILE, Study, run_study
from flower_vfl.simulations.studies.trials import Trial
from flower_vfl.specs import split_specs

from ..studies import matrix as grids
from .compare import seeds_of
from .options import finish, takes_settings

# A run of seconds: three thousand rows, and one evaluation at the end.
_BASE = RunConfig(limit=3000, valid_fraction=0.2, split_seed=0, epochs=8)
_BASE = replace(_BASE, batch_size=128, leak_every=3, evaluate_every=1000)
_QUICK: dict[str, Any] = {"limit": 200, "epochs": 2, "leak_every": 1}
_WITHOUT = "dataset defense objective seed label_dp capture label_party passive "
_WITHOUT += "id_column label_column task missing drop alignment group padding normalise"
_FIGURES = ("dcs", "leak", "largest_leak", "utility", "utility_none")
_BEST = 3  # methods in the summary of a dataset


@takes_settings(_BASE, without=_WITHOUT.split())
def matrix(
    config: RunConfig,
    datasets: list[str] | None = None,
    methods: list[str] | None = None,
    grid_file: Path | None = None,
    seeds: str = "3",
    tuning_seed: int = 100,
    beta: float = 0.5,
    quick: bool = False,
    workers: int = 1,
    ray_address: str = "",
    gpus: float = 0.0,
    out: Path | None = None,
    docs: Path | None = None,
    as_json: bool = False,
) -> None:
    """Rank defenses against many attacks on many datasets; resumes if interrupted.

    For example:
    flower-vfl matrix --workers 2 --out runs/matrix --docs docs/benchmark.md
    flower-vfl matrix --dataset spambase --method marvell --method ladsg --seeds 5
    """
    grid = grids.Grid.read(grid_file, quick).only(datasets or [], methods or [])
    config = replace(config, **_QUICK) if quick else config
    if given := split_specs(config.attack):
        grid = replace(grid, attacks=given, tuning_attacks=given)
    reported = seeds_of(seeds, 0)
    if tuning_seed in reported:
        raise ConfigError(f"the tuning seed {tuning_seed} is one of the report's seeds")
    grids.dcs(0.5, 1.0, 1.0, beta)  # refuses what is no weight
    if config.split_seed < 0:
        raise ConfigError("set split_seed, so that no test row plays a part in tuning")
    parts, reasons = grids.fitting(grid, replace(config, attack=""))
    folder = out or Path("runs") / (f"{grids.MATRIX}-quick" if quick else grids.MATRIX)
    before = (read_json(folder / STUDY_FILE) or {}).get("extra", {})  # if interrupted
    extra: dict[str, Any] = {"wall_seconds": float(before.get("wall_seconds", 0.0))}
    extra |= {"left_out": reasons, "workers": workers}
    extra["command"] = shlex.join(["flower-vfl", *sys.argv[1:]])
    title = f"{len(grid.methods) + 1} methods on {len(parts)} datasets"
    how: Any = {"workers": workers, "ray_address": ray_address, "gpus": gpus}
    how |= {"bar": not as_json, "extra": extra}

    def run(trials: Sequence[Trial], stage: str) -> Study:
        begun, before = time.monotonic(), extra["wall_seconds"]
        study = None
        try:
            name = f"{title}: {stage}"
            study = run_study(folder, grids.MATRIX, name, trials, **how)
        finally:
            extra["wall_seconds"] = before + time.monotonic() - begun
            study = study or Study.load(folder)
            study.extra = dict(extra)
            study.save()
        return study

    tuned = grids.tuning_trials(parts, config, tuning_seed)
    chosen = grids.choose(run(tuned, "tuning"))
    tuned += grids.reported_trials(parts, config, chosen, reported)
    study = run(tuned, "all runs")
    found = grids.ranking(grids.cells(study), beta)
    if docs is not None:
        write_whole(docs, benchmark_page(study).encode())
    document = {"title": title, "beta": beta, "ranking": found.to_dict("records")}
    document |= {"cells": grids.cells(study).to_dict("records"), **extra}
    finish(study, document, as_json, partial(_show, found, reasons))


def _show(found: pd.DataFrame, reasons: dict[str, dict[str, str]]) -> None:
    """Print the ranking of each dataset and over all, and the best three."""
    console = Console(highlight=False)
    heads = ["", "method", "DCS", "mean leak", "largest leak", "utility", "without"]
    for dataset, own in found.groupby("dataset", sort=False):
        rows = []
        for row in own.to_dict("records"):
            names = dict.fromkeys([row["method"], row["setting"]])
            name = "\n".join(filter(None, names))
            name += "\n(did not train)" if row["untrained"] else ""
            figures = [f"{row[column]:.3f}" for column in _FIGURES]
            rows.append([str(row["rank"]), name, *figures])
        console.print(str(dataset), style="bold", markup=False)
        console.print(text_table(heads, rows, left=2))
        good = own[(own["untrained"] == "") & (own["method"] != VANILLA)][:_BEST]
        named = zip(good["method"], good["dcs"], strict=True)
        best = ", ".join(f"{method} ({score:.3f})" for method, score in named)
        console.print(f"Best by DCS: {best or 'none trained'}", markup=False)
        for name, why in reasons.get(str(dataset), {}).items():
            console.print(f"Left out: {name}: {why}", markup=False)
