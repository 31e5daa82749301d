"""A matrix: defenses against attacks on several datasets, and a ranking of them.

A defense's setting is tuned for each dataset: every setting of the grid is run once
with a seed of its own, and the one with the largest mean DCS on validation rows is
chosen. Only chosen settings are run with the seeds of the report, on test rows. All
runs divide the rows in the same way, so that no test row plays a part in tuning.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.simulations.attacks import COMPLETIONS
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import RUN, tables
from flower_vfl.specs import parse_spec

from .methods import VANILLA, parse_method
from .run_metrics import completions, largest_leaks, utilities
from .study import Study
from .tradeoff import untrained
from .trials import Trial, check_run, task_of

MATRIX, ALL = "matrix", "all datasets"
STAGE, TUNING, REPORTED = "stage", "tuning", "reported"
COLUMNS = ["dataset", "method", "setting", "attack", "seed", "leak", "utility"]
COLUMNS += ["utility_none", "dcs", "untrained"]
GUESS = 0.5  # leak AUC of an attack that finds nothing
_GRID = Path(__file__).with_name("matrix.toml")
_METHOD = ["dataset", "method"]


@dataclass(frozen=True)
class Grid:
    """What a matrix consists of; `methods` has the settings to try of each defense."""

    datasets: Sequence[str]
    attacks: Sequence[str]
    tuning_attacks: Sequence[str]
    methods: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, path: Path | None = None, quick: bool = False) -> Grid:
        """Read a grid from a TOML file, the project's own if none is given."""
        try:
            known = tomllib.loads((path or _GRID).read_text("utf-8"))
            small = known.pop("quick", {})
            if quick:
                names, count = small.pop("methods"), small.pop("settings")
                chosen = {name: known["methods"][name][:count] for name in names}
                known |= {**small, "methods": chosen}
            return cls(**known)
        except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"'{path or _GRID}' is not a matrix: {error}") from error

    def only(self, datasets: Sequence[str], methods: Sequence[str]) -> Grid:
        """Return the part of a grid with these datasets and methods; all if none."""
        for name in methods:
            check_name("method of the matrix", name, self.methods)
        kept = {name: self.methods[name] for name in methods or self.methods}
        return replace(self, datasets=datasets or self.datasets, methods=kept)


def dcs(
    leak: ArrayLike, utility: ArrayLike, utility_none: ArrayLike, beta: float = 0.5
) -> NDArray[np.float64]:
    """Return the defense capability score of VFLAIR, 1 for a perfect defense.

    DCS = 1/(1 + √((1 − β)·(AP − AP*)² + β·(MP − MP*)²)) of leak AUC AP and metric MP;
    AP* is 0.5, MP* that without a defense. A negative loss or gain counts as 0.
    """
    if not 0.0 <= beta <= 1.0:
        raise ConfigError(f"beta is a weight from 0 to 1, got {beta:g}")
    found = np.maximum(np.asarray(leak, float) - GUESS, 0.0)
    lost = np.maximum(np.asarray(utility_none, float) - np.asarray(utility), 0.0)
    distance = np.sqrt((1.0 - beta) * found**2 + beta * lost**2)
    return np.asarray(1.0 / (1.0 + distance))


# --- what is run --------------------------------------------------------------------


def fitting(grid: Grid, config: RunConfig) -> tuple[dict[str, Grid], dict[str, Any]]:
    """Return the part of a grid that fits each dataset, and why the rest does not.

    A method that fits no dataset is an error.
    """
    parts: dict[str, Grid] = {}
    reasons: dict[str, dict[str, str]] = {}
    for dataset in grid.datasets:
        own = replace(config, dataset=dataset)
        task = task_of(own)
        if task == "regression":
            raise ConfigError(f"the matrix is for classes, '{dataset}' is a regression")
        methods, reasons[dataset] = {}, {}
        for name, settings in grid.methods.items():
            try:
                for setting in settings:
                    check_run(parse_method(setting).over(own, {}))
                methods[name] = settings
            except ConfigError as error:
                reasons[dataset][name] = str(error)
        attacks = list(grid.attacks)
        for attack in grid.attacks:
            if task != "binary" and parse_spec(attack)[0] in COMPLETIONS:
                attacks.remove(attack)
                reasons[dataset][attack] = "its success has no AUC with several classes"
        parts[dataset] = replace(grid, methods=methods, attacks=attacks)
        check_run(replace(own, attack=",".join([*attacks, *grid.tuning_attacks])))
    for name in grid.methods:
        if not any(name in part.methods for part in parts.values()):
            why = reasons[grid.datasets[0]][name]
            raise ConfigError(f"the method '{name}' fits no dataset: {why}")
    return parts, reasons


def tuning_trials(
    parts: Mapping[str, Grid], config: RunConfig, seed: int
) -> list[Trial]:
    """Return a run for each setting to tune, and one without a defense per dataset."""
    return [
        _trial(config, TUNING, dataset, name, setting, seed, part.tuning_attacks)
        for dataset, part in parts.items()
        for name, settings in {VANILLA: [VANILLA], **part.methods}.items()
        if len(settings) > 1 or name == VANILLA
        for setting in settings
    ]


def reported_trials(
    parts: Mapping[str, Grid],
    config: RunConfig,
    chosen: Mapping[tuple[str, str], str],
    seeds: Sequence[int],
) -> list[Trial]:
    """Return the runs of the chosen settings, all methods of one seed first."""
    return [
        _trial(config, REPORTED, dataset, name, setting, seed, part.attacks)
        for seed in seeds
        for dataset, part in parts.items()
        for name in (VANILLA, *part.methods)
        if (setting := _single(part, name) or chosen.get((dataset, name)))
    ]


def _single(part: Grid, name: str) -> str:
    """Return the only setting of a method, or an empty text if there are several."""
    settings = part.methods.get(name, [VANILLA])
    return settings[0] if len(settings) == 1 else ""


def _trial(
    config: RunConfig,
    stage: str,
    dataset: str,
    method: str,
    setting: str,
    seed: int,
    attacks: Sequence[str],
) -> Trial:
    given = replace(config, dataset=dataset, seed=seed, attack=",".join(attacks))
    labels = {STAGE: stage, "dataset": dataset, "method": method}
    labels |= {"defense": setting, "seed": str(seed)}
    return Trial(labels, parse_method(setting).over(given, {}))


# --- what was found -----------------------------------------------------------------


def cells(study: Study, stage: str = REPORTED) -> pd.DataFrame:
    """Return what each attack found in each run of a matrix, in `COLUMNS`.

    `utility_none` is that of the run without a defense and with the same seed. A run
    without an evaluation is left out, and one whose counterpart is not finished.
    """
    labels = study.labels().loc[study.finished].query(f"{STAGE} == @stage")
    records = tables({key: study.documents[key] for key in labels.index})
    wanted, other = ("test", "valid") if stage == REPORTED else ("valid", "test")
    records = records[records["split"] != other]
    done = completions(records).query("split == 'train'")  # the labels to protect
    parts = [largest_leaks(records), done.rename(columns={"value": "leak"})]
    whole = pd.concat([part[[RUN, "attack", "leak"]] for part in parts])
    main = utilities(records)
    known = main["value"][main["name"].str.startswith(wanted)].rename("utility")
    whole = whole.join(labels, on=RUN).join(known, on=RUN)
    whole = whole.join(untrained(records).rename("untrained"), on=RUN)
    whole = whole.rename(columns={"defense": "setting"}).astype({"seed": int})
    plain = whole[whole["method"] == VANILLA].drop_duplicates(["dataset", "seed"])
    without = plain.set_index(["dataset", "seed"])["utility"].rename("utility_none")
    whole = whole.join(without, on=["dataset", "seed"])
    whole = whole.dropna(subset=["utility", "utility_none"])
    places = {key: place for place, key in enumerate(labels.index)}
    whole = whole.sort_values(RUN, key=lambda run: run.map(places), kind="stable")
    score = dcs(whole["leak"], whole["utility"], whole["utility_none"])
    return whole.assign(dcs=score)[COLUMNS].reset_index(drop=True)


def choose(study: Study) -> dict[tuple[str, str], str]:
    """Return the setting of each dataset and method with the best DCS when tuning.

    A setting that did not train is taken only if none of the method did; of settings
    with the same DCS, the first of the grid.
    """
    found = cells(study, TUNING)
    labels = study.labels().loc[study.finished]
    for dataset in labels.loc[labels["method"] == VANILLA, "dataset"].unique():
        if dataset not in set(found["dataset"]):
            problem = f"no attack was measured when tuning on '{dataset}'"
            raise ConfigError(f"{problem}; measure more often: --leak-every 1")
    grouped = found.groupby([*_METHOD, "setting"], sort=False)
    means = grouped.agg(dcs=("dcs", "mean"), failed=("untrained", any))
    order = means.sort_values(["failed", "dcs"], ascending=[True, False], kind="stable")
    best = order.reset_index().drop_duplicates(_METHOD)
    keys = zip(best["dataset"], best["method"], strict=True)
    return dict(zip(keys, best["setting"], strict=True))


def ranking(cells: pd.DataFrame, beta: float = 0.5) -> pd.DataFrame:
    """Return the methods of each dataset and over all, the best mean DCS first.

    The DCS over all is the mean of datasets on which every method was run. Methods
    with a run that did not train follow those without one.
    """
    score = dcs(cells["leak"], cells["utility"], cells["utility_none"], beta)
    scored = cells.assign(dcs=score)
    by_attack = scored.groupby([*_METHOD, "attack"], sort=False)["leak"].mean()
    largest = by_attack.groupby(_METHOD, sort=False).max().rename("largest_leak")
    strongest = by_attack.groupby(_METHOD, sort=False).idxmax().str[-1]
    names = {n: (n, "mean") for n in ("dcs", "leak", "utility", "utility_none")}
    failed = {"untrained": ("untrained", _reason)}
    grouped = scored.groupby(_METHOD, sort=False)
    own = grouped.agg(setting=("setting", "first"), **names, **failed)
    own = own.join(largest).join(strongest.rename("largest_attack")).reset_index()
    shared = own[own["dataset"].isin(common_datasets(own))]
    numbers = {n: (n, "mean") for n in (*names, "largest_leak")}
    over_all = shared.groupby("method", sort=False).agg(**numbers, **failed)
    over_all = over_all.reset_index().assign(dataset=ALL, setting="", largest_attack="")
    whole = pd.concat([own, over_all], ignore_index=True)
    place, lost = pd.factorize(whole["dataset"])[0], whole["untrained"] != ""
    whole = whole.assign(place=place, failed=lost, minus=-whole["dcs"])
    whole = whole.sort_values(["place", "failed", "minus"], kind="stable")
    rank = whole.groupby("dataset").cumcount() + 1
    order = ["dataset", "method", "setting", "rank", "dcs", "leak", "largest_leak"]
    order += ["largest_attack", "utility", "utility_none", "untrained"]
    return whole.assign(rank=rank)[order].reset_index(drop=True)


def common_datasets(ranked: pd.DataFrame) -> list[str]:
    """Return the datasets on which all methods were run, all if there is none."""
    own = ranked[ranked["dataset"] != ALL]
    counts = own.groupby("dataset", sort=False)["method"].nunique()
    common = counts.index[counts == own["method"].nunique()]
    return [str(name) for name in (common if len(common) else counts.index)]


def _reason(reasons: pd.Series[str]) -> str:
    """Return the first reason why something did not train, empty if all did."""
    return str(next((reason for reason in reasons if reason), ""))
