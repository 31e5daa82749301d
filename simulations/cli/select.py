"""``flower-vfl select``: GAFM's Δ and γ, chosen on a subset of the training rows."""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from rich.console import Console
from torch import nn

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import GAFM, SubsetTraining, select_delta, select_gamma
from flower_vfl.objectives.selection import DELTAS
from flower_vfl.parties.base import as_tensors
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.models.registry import build_bottom, build_optimizer
from flower_vfl.simulations.objectives import objective_for
from flower_vfl.simulations.parties import load_rows
from flower_vfl.simulations.printing import print_json, text_table
from flower_vfl.specs import parse_spec

from .options import takes_settings

DEFAULT = RunConfig(objective="gafm", aggregation="mean", width=1)
_DELTAS = ",".join(map(str, DELTAS))


@takes_settings(DEFAULT, without=("defense", "defense_at", "attack"))
def select(
    config: RunConfig,
    deltas: str = _DELTAS,
    fraction: float = 0.1,
    repeats: int = 5,
    as_json: bool = False,
) -> None:
    """Choose GAFM's Δ by leakage and γ by the size of its two gradients."""
    try:
        candidates = [float(text) for text in deltas.split(",")]
    except ValueError as error:
        raise ConfigError(f"'{deltas}' are not numbers like 0.05,0.1") from error
    training, make = subset_training(config, fraction, "delta")
    chosen = select_delta(training, make, candidates, repeats)
    if not chosen.learned:
        found = ", ".join(f"{d:g}: {a:.2f}" for d, a in chosen.train_aucs.items())
        text = f"after {config.epochs} epochs GAFM has not learned the training labels"
        remedy = "increase --epochs or --fraction"
        raise ConfigError(f"{text} (train AUC by delta: {found}); {remedy}")
    balanced = select_gamma(*subset_training(config, fraction, "gamma"))
    if as_json:
        print_json(asdict(chosen) | asdict(balanced))
        return
    aucs, ratios = chosen.train_aucs, chosen.ratios
    rows = [[f"{d:g}", f"{aucs[d]:.3f}", f"{ratio:.3f}"] for d, ratio in ratios.items()]
    console = Console(highlight=False)
    console.print(text_table(["delta", "train AUC", "leak AUC / train AUC"], rows, 0))
    leaking = f"delta {chosen.delta:g} leaks least relative to its train AUC"
    equal = f"gamma {balanced.gamma:.3g} makes both gradients equally large"
    console.print(f"{leaking}; {equal}")


def subset_training(
    config: RunConfig, fraction: float, key: str
) -> tuple[SubsetTraining, Callable[[float], GAFM]]:
    """Return the training on a part of a run's rows, and what a value is tried with."""
    if config.label_dp or config.label_budget:
        text = "settings are chosen by true labels, which label privacy does not cover"
        raise ConfigError(f"{text}; use public labels without label-dp, label-budget")
    name, parameters = parse_spec(config.objective)
    if name != "gafm":
        raise ConfigError(f"{key} is chosen for the objective 'gafm', not '{name}'")
    rows = [load_rows(config, index) for index in range(config.parties + 1)]
    label = rows[0]
    if label.labels is None:
        raise ConfigError("the label party has no labels to choose settings with")
    if label.data.inputs:
        raise ConfigError("only passive parties may have columns; set label-share to 0")
    used = torch.from_numpy((label.codes == TRAIN).nonzero()[0])
    specs = [party.data.spec for party in rows[1:] if party.data.spec is not None]
    inputs = [[p[used] for p in as_tensors(party.data.inputs)] for party in rows[1:]]

    def bottoms() -> list[nn.Module]:
        return [build_bottom(config.bottom, spec, config.width) for spec in specs]

    def make(value: float) -> GAFM:
        given = parameters | {key: str(value)}
        text = ",".join(f"{k}={v}" for k, v in given.items())
        made = objective_for(replace(config, objective=f"gafm:{text}"), label)
        assert isinstance(made, GAFM)
        return made

    labels, batch = as_tensors(label.labels)[0][used], config.batch_size or len(used)
    optimizer = build_optimizer(config.optimizer)
    given = config.epochs, batch, optimizer, config.aggregation, config.seed
    return SubsetTraining(inputs, labels, bottoms, fraction, *given), make
