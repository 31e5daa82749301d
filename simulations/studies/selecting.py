"""GAFM's Δ and γ for a run, chosen on a part of its training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import (
    GAFM,
    DeltaChoice,
    GammaChoice,
    SubsetTraining,
    select_delta,
    select_gamma,
)
from flower_vfl.objectives.selection import DELTAS
from flower_vfl.parties.base import as_tensors
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.models import build_bottom
from flower_vfl.simulations.models.registry import build_optimizer
from flower_vfl.simulations.objectives import objective_for
from flower_vfl.simulations.parties import PartyRows, load_rows
from flower_vfl.specs import parse_spec


def choose_delta(
    config: RunConfig,
    deltas: Sequence[float] = DELTAS,
    fraction: float = 0.1,
    repeats: int = 5,
) -> DeltaChoice:
    """Return GAFM's Δ for a run; everything else is as the settings say."""
    rows = [load_rows(config, index) for index in range(config.parties + 1)]
    training = subset_training(config, rows, fraction)
    return select_delta(
        training, lambda value: _with(config, rows[0], "delta", value), deltas, repeats
    )


def choose_gamma(
    config: RunConfig,
    fraction: float = 0.1,
    repeats: int = 1,
    literal: bool = False,
) -> GammaChoice:
    """Return GAFM's γ for a run; everything else is as the settings say."""
    rows = [load_rows(config, index) for index in range(config.parties + 1)]
    training = subset_training(config, rows, fraction)
    return select_gamma(
        training,
        lambda value: _with(config, rows[0], "gamma", value),
        repeats,
        literal,
    )


def subset_training(
    config: RunConfig, rows: Sequence[PartyRows], fraction: float
) -> SubsetTraining:
    """Return the training on a part of the rows for a run."""
    label = rows[0]
    if label.labels is None:
        raise ConfigError("the label party has no labels to choose settings with")
    if label.data.inputs:
        raise ConfigError(
            "settings are chosen for passive parties only; set label-share to 0"
        )
    training = torch.from_numpy((label.codes == TRAIN).nonzero()[0])
    specs = [party.data.spec for party in rows[1:] if party.data.spec is not None]

    def parts(party: PartyRows) -> list[Tensor]:
        return [part[training] for part in as_tensors(party.data.inputs)]

    def bottoms() -> list[nn.Module]:
        return [build_bottom(config.bottom, spec, config.width) for spec in specs]

    return SubsetTraining(
        [parts(party) for party in rows[1:]],
        as_tensors(label.labels)[0][training],
        bottoms,
        fraction,
        config.epochs,
        config.batch_size or len(training),
        build_optimizer(config.optimizer),
        config.aggregation,
        config.seed,
    )


def _with(config: RunConfig, rows: PartyRows, key: str, value: float) -> GAFM:
    """Return the objective of the settings with one parameter replaced."""
    name, parameters = parse_spec(config.objective)
    parameters[key] = str(value)
    text = ",".join(f"{k}={v}" for k, v in parameters.items())
    made = objective_for(replace(config, objective=f"{name}:{text}"), rows)
    if not isinstance(made, GAFM):
        raise ConfigError(f"{key} is chosen for the objective 'gafm', not '{name}'")
    return made
