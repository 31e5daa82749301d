"""A result for a person: what the command prints."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flower_vfl.transform import AUC_BOUND

_SUCCESSES = ("train", "test", "labels_only_train", "labels_only_test")
# Settings with which probabilities may be off, so that their error is shown.
_LACKING = ("absent_labels", "absent_features", "calibration")


def show_result(document: dict[str, Any]) -> None:
    """Print a result document."""
    config, seconds = document["config"], document["seconds"]
    source = Path(config["label_party"]).name or config["dataset"]
    title = f"{source}: {config['parties']} passive parties"
    if config["defense"]:
        title += f", {config['defense']} at the {config['defense_at']}"
    console = Console()
    console.print(title, highlight=False)
    console.print(_epochs(document))
    if document["leakage"]:
        values = any(name.endswith("_pearson") for name in document["final"])
        what, none = ("|rho| of score and label", 0) if values else ("leak AUC", 0.5)
        console.print(f"{what}, mean over all batches ({none}: nothing leaks)")
        key = "flipped_mean" if values else "mean"
        console.print(_leakage(document["leakage"], key))
    if document.get("membership"):
        console.print(
            "AUC of telling synthetic rows, mean over all batches (0.5: none)"
        )
        console.print(_leakage(document["membership"], "mean"))
    _show_bounds(console, document)
    if document.get("completion"):
        console.print("model completion, beside what the known labels alone give")
        console.print(_completion(document["completion"]))
    if document["stopped"]:
        console.print(f"stopped early: {document['stopped']}", highlight=False)
    console.print(
        f"{seconds['total']:.1f} s on {document['engine']}, "
        f"{seconds['step'] * 1e3:.2f} ms per step",
        highlight=False,
    )
    if config["out"]:
        console.print(f"saved in {config['out']}", highlight=False, soft_wrap=True)


def _epochs(document: dict[str, Any]) -> Table:
    table = Table()
    epochs = document["epochs"]
    lacking = any(document["config"].get(name) for name in _LACKING)
    hidden = ("_loss",) if lacking else ("_loss", "_ace")
    names = [key for key in document["final"] if not key.endswith(hidden)]
    for name in ("epoch", "loss", *names):
        table.add_column(name.replace("_", " "), justify="right")
    shown = sorted({0, len(epochs) // 2, len(epochs) - 1})
    for metrics in (epochs[index] for index in shown):
        cells = [f"{metrics[name]:.4f}" if name in metrics else "" for name in names]
        table.add_row(str(metrics["epoch"]), f"{metrics['loss']:.4f}", *cells)
    return table


def _leakage(leakage: dict[str, dict[str, dict[str, float]]], key: str) -> Table:
    """Return one figure of each attack on each party, and on each of its layers."""
    table = Table()
    attacks = list(dict.fromkeys(a for found in leakage.values() for a in found))
    layers = [attack for attack in attacks if "@" in attack]
    attacks = [attack for attack in attacks if "@" not in attack]
    for name in ("party", *attacks):
        table.add_column(name, justify="left" if name == "party" else "right")
    for party, found in leakage.items():
        cells = [_cell(found, attack, key) for attack in attacks]
        table.add_row(party.replace("/", " "), *cells)
        for layer in dict.fromkeys(a.partition("@")[2] for a in layers if a in found):
            cells = [_cell(found, f"{attack}@{layer}", key) for attack in attacks]
            table.add_row(f"  layer {layer}", *cells)
    return table


def _cell(found: dict[str, dict[str, float]], attack: str, key: str) -> str:
    return f"{found[attack][key]:.3f}" if attack in found else ""


def _completion(found: list[dict[str, Any]]) -> Table:
    """Return the success of model completion beside what the labels alone give."""
    table = Table()
    for name in ("attack", "party", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("train", "test", "alone: train", "alone: test"):
        table.add_column(name, justify="right")
    for attack, party in dict.fromkeys((e["attack"], e["party"]) for e in found):
        entries = [e for e in found if (e["attack"], e["party"]) == (attack, party)]
        cells = [_average(entries, key) for key in _SUCCESSES]
        name = attack.partition(":")[0]
        table.add_row(name, party, entries[0]["metric"], *cells)
    return table


def _average(entries: list[dict[str, Any]], key: str) -> str:
    values = [entry[key] for entry in entries if entry[key] is not None]
    if not values:
        return ""
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}"


def _show_bounds(console: Console, document: dict[str, Any]) -> None:
    """Print what a defense guarantees and found, party by party."""
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
        if metric == "suspected" and any(series["values"]):
            first = series["steps"][series["values"].index(1.0)]
            responses = document["series"][f"response/{party}"]["values"]
            console.print(
                f"{party} is suspected from step {first} on: its embeddings move up to "
                f"{max(responses):.1f} times as far for its gradients as those of the "
                "other parties",
                highlight=False,
            )
