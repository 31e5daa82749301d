"""Leakage and cost as the number of passive parties grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.datasets import load_dataset, party_columns
from flower_vfl.simulations.results import RUN
from flower_vfl.simulations.runtime.memory import can_watch_memory
from flower_vfl.specs import build_from_spec

from .run_metrics import leaks, main_metric, utilities, whole_run
from .study import Study
from .trials import Trial

PARTIES, PART, SEED = "parties", "part", "seed"  # labels of a trial
LEAKAGE, COST = "leakage", "cost"  # its parts
# Datasets that a number of parties can share, by their columns.
COLUMNS = {
    "breast-cancer": 30,
    "criteo": 39,
    "spambase": 57,
    "digits": 64,
    "imdb": 500,
    "ag-news": 1000,
}
_COST_EPOCHS = 2  # enough for a mean over steps


@dataclass(frozen=True)
class Size:
    """What was found with one number of passive parties, mean over seeds."""

    parties: int
    columns: tuple[int, int]
    metric: str
    utility: float
    leaks: dict[str, tuple[float, float, float]]
    seconds: float
    traffic: float
    memory: float | None


def dirichlet(alpha: float = 0.5, seed: int = 0) -> str:
    """Return the setting of a division by shares from a Dirichlet distribution."""
    return f"dirichlet={alpha},{seed}"


DIVISIONS: dict[str, Callable[..., str]] = {"dirichlet": dirichlet}


def division_of(text: str) -> str:
    """Return the setting ``split`` that a config string stands for."""
    return build_from_spec("division", text, DIVISIONS) if text else "even"


def sizes_of(text: str) -> list[int]:
    """Return the numbers of parties that an option lists."""
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"'{text}' are not numbers of parties, as in 1,2,4,8")
    return sorted(set(sizes))


def scale_trials(
    config: RunConfig, sizes: Sequence[int], seeds: int, engine: str = "in-process"
) -> list[Trial]:
    """Return the runs of a study: leakage, and cost without the attacks."""
    trials = []
    for parties in sizes:
        sized = replace(config, parties=parties)
        together = config.coalitions if parties > 1 else ""
        leaking = replace(sized, coalitions=together)
        bare = replace(
            sized,
            attack="",
            coalitions="",
            leak_limit=0.0,
            leak_baseline=False,
            leak_layers=False,
            epochs=min(config.epochs, _COST_EPOCHS),
            watch_memory=can_watch_memory(),
        )
        for part, made in ((LEAKAGE, leaking), (COST, bare)):
            for seed in range(config.seed, config.seed + seeds):
                labels = {PARTIES: str(parties), PART: part, SEED: str(seed)}
                trials.append(Trial(labels, replace(made, seed=seed), engine))
    return trials


def columns_of(config: RunConfig, parties: int) -> tuple[int, int]:
    """Return the fewest and the most columns of a passive party."""
    dataset = load_dataset(
        config.dataset,
        data_dir=Path(config.data_dir) if config.data_dir else None,
        target=config.target or None,
        limit=config.limit or None,
    )
    codes = dataset.split(config.seed, config.test_fraction, config.valid_fraction)
    try:
        divided = party_columns(
            dataset, codes, parties, config.split, config.label_share
        )
    except ConfigError as error:
        enough = [f"{n} ({c})" for n, c in COLUMNS.items() if c >= parties]
        known = ", ".join(enough) or "no known dataset has as many"
        text = f"{error}. Datasets with enough columns: {known}"
        raise ConfigError(text) from error
    widths = [len(columns) for columns in divided[1:]]
    return min(widths), max(widths)


def found_sizes(study: Study) -> list[Size]:
    """Return what a study found, by the number of parties."""
    records, labels = study.records(), study.labels().loc[study.finished]
    sizes = []
    for _, own in labels.groupby(labels[PARTIES].astype(int)):
        leaking, bare = (own.index[own[PART] == part] for part in (LEAKAGE, COST))
        if len(leaking) and len(bare):
            config = RunConfig(**study.documents[leaking[0]]["config"])
            both = (records[records[RUN].isin(keys)] for keys in (leaking, bare))
            sizes.append(_size(config, *both))
    return sizes


def _size(config: RunConfig, leaking: pd.DataFrame, bare: pd.DataFrame) -> Size:
    memory = whole_run(bare, "memory_peak")
    return Size(
        parties=config.parties,
        columns=columns_of(config, config.parties),
        metric=main_metric(leaking),
        utility=float(utilities(leaking)["value"].mean()),
        leaks=_leaks(leaking),
        seconds=float(whole_run(bare, "seconds_step").mean()),
        traffic=float(whole_run(bare, "bytes_step").mean()),
        memory=None if memory.empty else float(memory.mean()),
    )


def _leaks(records: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Return mean, worst and coalition of each attack, mean over the runs."""
    found = leaks(records).query("layer == '' and not random")
    by = [RUN, "attack"]
    single = found[~found["coalition"]].groupby(by, sort=False)["leak"]
    joint = found[found["coalition"]].groupby(by)["leak"].max()
    # without a coalition the best that anybody can do is what one party does
    both = single.agg(["mean", "max"]).assign(together=joint)
    both = both.assign(together=both["together"].fillna(both["max"]))
    means = both.groupby("attack", sort=False).mean()
    return {str(row[0]): (row[1], row[2], row[3]) for row in means.itertuples()}


def growth(sizes: Sequence[Size]) -> dict[str, float]:
    """Return how much each cost grew from the fewest to the most parties."""
    first, last = sizes[0], sizes[-1]
    factors = {
        "parties": last.parties / first.parties,
        "seconds": last.seconds / first.seconds,
        "bytes": last.traffic / first.traffic,
    }
    if first.memory and last.memory:
        factors["memory"] = last.memory / first.memory
    return factors
