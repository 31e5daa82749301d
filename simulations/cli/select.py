"""``flower-vfl select``: GAFM's Δ and γ, chosen on a part of the training rows."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.objectives.selection import DELTAS
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.studies.selecting import choose_delta, choose_gamma

from .options import takes_settings
from .show import text_table

DEFAULT = RunConfig(objective="gafm", aggregation="mean", width=1)


@takes_settings(DEFAULT, without=("defense", "defense_at", "attack"))
def select(
    config: RunConfig,
    deltas: Annotated[
        str, typer.Option(help="Candidates for Δ, separated by commas.")
    ] = ",".join(map(str, DELTAS)),
    fraction: Annotated[
        float, typer.Option(help="Share of the training rows that is used.")
    ] = 0.1,
    repeats: Annotated[int, typer.Option(help="Trainings of each candidate.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the choice as JSON and nothing else.")
    ] = False,
) -> None:
    """Choose GAFM's Δ by what leaks and γ by the size of its two gradients."""
    try:
        candidates = [float(text) for text in deltas.split(",")]
    except ValueError as error:
        raise ConfigError(f"'{deltas}' are not numbers, as in 0.05,0.1") from error
    chosen = choose_delta(config, candidates, fraction, repeats)
    if not chosen.learned:
        found = ", ".join(f"{d:g}: {a:.2f}" for d, a in chosen.train_aucs.items())
        raise ConfigError(
            f"after {config.epochs} epochs GAFM has not learned the labels of the "
            f"rows it trained on (train AUC by delta: {found}), so that the ratios "
            "mean nothing; train longer with --epochs, or on more rows with --fraction"
        )
    balanced = choose_gamma(config, fraction)
    document: dict[str, Any] = {
        "delta": chosen.delta,
        "ratios": chosen.ratios,
        "train_aucs": chosen.train_aucs,
        "gamma": balanced.gamma,
        "gan": balanced.gan,
        "ce": balanced.ce,
    }
    if as_json:
        print(json.dumps(document))
        return
    rows = [
        [f"{delta:g}", f"{chosen.train_aucs[delta]:.3f}", f"{ratio:.3f}"]
        for delta, ratio in chosen.ratios.items()
    ]
    console = Console()
    console.print(text_table(["delta", "train AUC", "leak AUC / train AUC"], rows, 0))
    console.print(
        f"delta {chosen.delta:g} leaks least for what it learns; gamma "
        f"{balanced.gamma:.3g} makes both gradients equally large",
        highlight=False,
    )
