"""``flower-vfl select``: GAFM's Δ and γ, chosen on a part of the training rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flower_vfl.errors import ConfigError
from flower_vfl.objectives.selection import DELTAS

from .config import RunConfig
from .config_file import read_settings
from .selecting import choose_delta, choose_gamma

DEFAULT = RunConfig(objective="gafm", aggregation="mean", width=1)


def select(
    config_file: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with the settings of the run."),
    ] = None,
    dataset: Annotated[str, typer.Option(help="A dataset by name.")] = DEFAULT.dataset,
    parties: Annotated[
        int, typer.Option(help="Number of passive parties.")
    ] = DEFAULT.parties,
    model: Annotated[
        str, typer.Option(help="Bottom model of every party.")
    ] = DEFAULT.bottom,
    width: Annotated[int, typer.Option(help="Width of the cut layer.")] = DEFAULT.width,
    objective: Annotated[
        str, typer.Option(help="gafm with any parameters; Δ and γ are replaced.")
    ] = DEFAULT.objective,
    optimizer: Annotated[
        str, typer.Option(help="Optimizer of every party.")
    ] = DEFAULT.optimizer,
    epochs: Annotated[
        int, typer.Option(help="Epochs of a rehearsal.")
    ] = DEFAULT.epochs,
    batch_size: Annotated[
        int, typer.Option(help="Rows of a batch; 0: all.")
    ] = DEFAULT.batch_size,
    seed: Annotated[
        int, typer.Option(help="Decides everything that is random.")
    ] = DEFAULT.seed,
    deltas: Annotated[
        str, typer.Option(help="Candidates for Δ, separated by commas.")
    ] = ",".join(map(str, DELTAS)),
    fraction: Annotated[
        float, typer.Option(help="Share of the training rows that is used.")
    ] = 0.1,
    repeats: Annotated[int, typer.Option(help="Rehearsals of each candidate.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the choice as JSON and nothing else.")
    ] = False,
) -> None:
    """Choose GAFM's Δ by what leaks and γ by the size of its two gradients."""
    config = replace(
        DEFAULT,
        dataset=dataset,
        parties=parties,
        bottom=model,
        width=width,
        objective=objective,
        optimizer=optimizer,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )
    if config_file is not None:
        config = RunConfig.from_run_config(
            {**DEFAULT.to_run_config(), **read_settings(config_file)}
        )
    try:
        candidates = [float(text) for text in deltas.split(",")]
    except ValueError as error:
        raise ConfigError(f"'{deltas}' are not numbers, as in 0.05,0.1") from error
    chosen = choose_delta(config, candidates, fraction, repeats)
    balanced = choose_gamma(config, fraction)
    document: dict[str, Any] = {
        "delta": chosen.delta,
        "ratios": chosen.ratios,
        "gamma": balanced.gamma,
        "gan": balanced.gan,
        "ce": balanced.ce,
    }
    if as_json:
        print(json.dumps(document))
        return
    table = Table()
    for name in ("delta", "leak AUC / train AUC"):
        table.add_column(name, justify="right")
    for delta, ratio in chosen.ratios.items():
        table.add_row(f"{delta:g}", f"{ratio:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"delta {chosen.delta:g} leaks least for what it learns; gamma "
        f"{balanced.gamma:.3g} makes both gradients equally large",
        highlight=False,
    )
