"""What the label party reaches alone: with its own columns, or by guessing."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.randomness import RandomState, derive_seed
from flower_vfl.simulations.config import ABOUT, DATA, FILES, RunConfig, parse_rates
from flower_vfl.simulations.parties import load_rows, make_label

_OF_DATA = [name for name in ABOUT if ABOUT[name].get("panel") in (DATA, FILES)]
# One model of one party, whatever the run has beside it.
_PLAIN: dict[str, Any] = {"objective": "auto", "aggregation": "mean"}
_PLAIN |= {"label_dp": "", "label_budget": "", "canaries": 0, "label_ledger": ""}


def data_of(config: RunConfig) -> RunConfig:
    """Return a run's settings of its data, the others as they are by default."""
    return RunConfig(**{name: getattr(config, name) for name in _OF_DATA})


def guess(config: RunConfig) -> float:
    """Return the main metric of a guess: 0.5, 0, or the share of the largest class."""
    return _guess(data_of(config))


@lru_cache(maxsize=8)
def _guess(config: RunConfig) -> float:
    rows = load_rows(config, 0)
    if rows.task != "multiclass" or rows.labels is None:
        return 0.5 if rows.task == "binary" else 0.0
    return max(Counter(rows.labels.tolist()).values()) / len(rows.labels)


def train_alone(config: RunConfig, epochs: int, split: str) -> Mapping[str, float]:
    """Return the metrics of a model of the label party's own columns, {} without any.

    It has the run's bottom model, top model, optimizer, batches and split of the rows.
    In a run that aligns ids, the label party splits its own rows.
    """
    plain = replace(config, **_PLAIN)
    rows = load_rows(plain, 0)
    if not rows.data.inputs:
        return {}
    seed = derive_seed(config.seed, "model", "label")  # as the run's
    with RandomState(seed, torch.device("cpu")):
        party = make_label(plain, rows, trust_server=True)
    party.describe(b"")
    rates = parse_rates(config.learning_rate)
    rate = rates.get("label") if isinstance(rates, dict) else rates
    fractions = config.test_fraction, config.valid_fraction
    size = config.batch_size
    party.configure(
        TrainingConfig(config.seed, size, 8192, *fractions, {}, "mean", rate or 0.0)
    )
    step, schedule = 0, party.configured()
    for epoch in range(1, epochs + 1):
        for index in range(schedule.batches("train", training=True)):
            step += 1
            party.train_step(step, epoch, index, {})
    found: dict[str, float] = {}
    for index in range(schedule.batches(split)):
        found = party.evaluate(split, index, {})
    return found
