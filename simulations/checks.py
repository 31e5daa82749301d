"""What can be known to be wrong with a run before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import lru_cache

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.leakage.attacks.registry import (
    DEFAULT_ATTACKS,
    SCORE_ATTACKS,
    build_attack,
    fits,
)
from flower_vfl.objectives import Task
from flower_vfl.simulations.models.registry import build_optimizer
from flower_vfl.simulations.studies.trials import Trial
from flower_vfl.specs import parse_spec
from flower_vfl.strategies import build_defense

from .attacks import check_attacks, split_attacks
from .config import DATA, FILES, RunConfig, parse_rates
from .models import build_bottom
from .objectives import objective_for
from .parties import PartyRows, load_rows
from .plugins import ADDED

_OF_DATA = [f.name for f in fields(RunConfig) if f.metadata["panel"] in (DATA, FILES)]


def task_of(config: RunConfig) -> Task:
    """Return the task of a run's data."""
    task = _rows(config, 0).task
    assert task is not None  # it is the label party's
    return task


def default_attacks(config: RunConfig) -> str:
    """Return the score attacks that fit a run's data: the usual ones and plugins'."""
    task = task_of(config)
    fitting = [name for name in ADDED.get("SCORE_ATTACKS", []) if fits(name, task)]
    return ",".join([*DEFAULT_ATTACKS[task], *fitting])


def check_run(config: RunConfig) -> None:
    """Build what a run is made of, and refuse what cannot be built."""
    build_defense(config.defense or "none")
    build_optimizer(config.optimizer)
    parse_rates(config.learning_rate)
    check_attacks(config)
    for text in split_attacks(config.attack):
        if parse_spec(text)[0] in SCORE_ATTACKS:
            build_attack(text, task_of(config))
    objective_for(config, _rows(config, 0))
    spec = _rows(config, 1).data.spec
    assert spec is not None  # a passive party without columns was refused
    build_bottom(config.bottom, spec, config.width)


def check_trials(trials: Iterable[Trial]) -> None:
    """Check every run of a study before the first one starts."""
    checked = set()
    for trial in trials:
        config = replace(trial.config, seed=0)  # no seed is wrong
        if config in checked:
            continue
        checked.add(config)
        try:
            check_run(config)
        except VerticalError as error:
            labels = ", ".join(f"{n} {v}" for n, v in trial.labels.items())
            raise ConfigError(f"{labels}: {error}") from error
    _load.cache_clear()  # the runs load what they need themselves


def _rows(config: RunConfig, index: int) -> PartyRows:
    data = {name: getattr(config, name) for name in _OF_DATA}
    return _load(RunConfig(**data), index)


@lru_cache(maxsize=2)  # the same data for most runs of a study
def _load(config: RunConfig, index: int) -> PartyRows:
    return load_rows(config, index)
