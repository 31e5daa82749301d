"""A result for a person: what the command prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flower_vfl.transform import AUC_BOUND


def show_result(document: dict[str, Any]) -> None:
    """Print a result document.

    Parameters
    ----------
    document : dict[str, Any]
        As :func:`flower_vfl.simulations.results.result_document` returned it.
    """
    config, seconds = document["config"], document["seconds"]
    source = Path(config["label_party"]).name or config["dataset"]
    title = f"{source}: {config['parties']} passive parties"
    if config["defense"]:
        title += f", {config['defense']} at the {config['defense_at']}"
    console = Console()
    console.print(_epochs(document, title))
    _show_bounds(console, document)
    console.print(
        f"{seconds['total']:.1f} s on {document['engine']}, "
        f"{seconds['step'] * 1e3:.2f} ms per step",
        highlight=False,
    )
    if config["out"]:
        console.print(f"saved in {config['out']}", highlight=False, soft_wrap=True)


def _epochs(document: dict[str, Any], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    epochs = document["epochs"]
    names = [key for key in document["final"] if not key.endswith("_loss")]
    for name in ("epoch", "loss", *names):
        table.add_column(name.replace("_", " "), justify="right")
    shown = sorted({0, len(epochs) // 2, len(epochs) - 1})
    for metrics in (epochs[index] for index in shown):
        cells = [f"{metrics[name]:.4f}" if name in metrics else "" for name in names]
        table.add_row(str(metrics["epoch"]), f"{metrics['loss']:.4f}", *cells)
    return table


def _show_bounds(console: Console, document: dict[str, Any]) -> None:
    """Print what a defense guarantees, party by party."""
    for name, series in document["series"].items():
        metric, _, party = name.partition("/")
        if metric == AUC_BOUND:
            values = series["values"]
            console.print(
                f"no attack on the gradients of {party} has an AUC above "
                f"{max(values):.3f} in any step, {sum(values) / len(values):.3f} on "
                "average",
                highlight=False,
            )
        if metric == "withheld" and sum(series["values"]):
            count, steps = int(sum(series["values"])), len(series["values"])
            console.print(
                f"{party} got no gradient in {count} of {steps} steps", highlight=False
            )
