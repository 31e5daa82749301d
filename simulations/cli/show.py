"""A result for a person: what the command prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from flower_vfl.leakage.monitor import MEMBERSHIP
from flower_vfl.simulations.printing import text_table
from flower_vfl.simulations.results import RUN, table
from flower_vfl.simulations.studies.run_metrics import leaks, utilities
from flower_vfl.specs import parse_spec
from flower_vfl.transform import AUC_BOUND

_SUCCESSES = ("train", "test", "labels_only_train", "labels_only_test")
# Settings with which probabilities may be off, so that their error is shown.
_LACKING = ("absent_labels", "absent_features", "calibration")


def show_result(document: dict[str, Any]) -> None:
    """Print a result document."""
    config, seconds = document["config"], document["seconds"]
    records = table(document).assign(**{RUN: ""})
    source = Path(config["label_party"]).name or config["dataset"]
    title = f"{source}: {config['parties']} passive parties"
    if config["defense"]:
        title += f", {config['defense']} at the {config['defense_at']}"
    console = Console()
    console.print(title, highlight=False)
    lacking = any(config.get(name) for name in _LACKING)
    console.print(
        _epochs(records, {"loss", "f1"} if lacking else {"loss", "f1", "ace"})
    )
    found = leaks(records)
    if not found.empty:
        regression = utilities(records)["regression"].any()
        what, none = (
            ("|rho| of score and label", 0) if regression else ("leak AUC", 0.5)
        )
        console.print(f"{what}, mean over all batches ({none}: nothing leaks)")
        console.print(_leakage(found, "flipped" if regression else "raw"))
    members = records[records["metric"] == MEMBERSHIP]
    if not members.empty:
        console.print(
            "AUC of telling synthetic rows, mean over all batches (0.5: none)"
        )
        means = members.groupby(["party", "attack", "layer"], sort=False)[
            "value"
        ].mean()
        console.print(_leakage(means.reset_index().assign(random=False), "value"))
    for line in _defense_lines(records):
        console.print(line, highlight=False)
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


def _epochs(records: pd.DataFrame, hidden: set[str]) -> Table:
    """Return loss and evaluation of the first, the middle and the last epoch."""
    training = records.query("metric == 'loss' and split == 'train' and step == 0")
    losses = training.set_index("epoch")["value"]
    found = records.query("step > 0 and party == '' and attack == ''")
    found = found[~found["metric"].isin(hidden)]
    names = found["split"] + " " + found["metric"].str.replace("_", " ")
    values = found.assign(name=names).set_index(["epoch", "name"])["value"]
    rows = []
    for place in sorted({0, len(losses) // 2, len(losses) - 1}):
        epoch = losses.index[place]
        cells = [losses[epoch], *(values.get((epoch, name)) for name in names.unique())]
        texts = ["" if value is None else f"{value:.4f}" for value in cells]
        rows.append([str(epoch), *texts])
    return text_table(["epoch", "loss", *names.unique()], rows, left=0)


def _leakage(found: pd.DataFrame, column: str) -> Table:
    """Return one figure of each attack on each party, and on each of its layers."""
    attacks, lines = list(found["attack"].unique()), []
    for (party, random), own in found.groupby(["party", "random"], sort=False):
        ordered = own.sort_values("layer", key=lambda names: names != "", kind="stable")
        for layer, rows in ordered.groupby("layer", sort=False):
            name = f"  layer {layer!s}" if layer else str(party)
            name += " random" if random and not layer else ""
            values = rows.set_index("attack")[column].reindex(attacks)
            cells = ["" if value != value else f"{value:.3f}" for value in values]
            lines.append([name, *cells])
    return text_table(["party", *attacks], lines)


def _completion(entries: list[dict[str, Any]]) -> Table:
    """Return the success of model completion beside what the labels alone give."""
    heads = [
        "attack",
        "party",
        "metric",
        "train",
        "test",
        "alone: train",
        "alone: test",
    ]
    lines = []
    groups = pd.DataFrame(entries).groupby(["attack", "party"], sort=False)
    for (attack, party), own in groups:
        cells = [_average(own[key].dropna().astype(float)) for key in _SUCCESSES]
        names = [parse_spec(str(attack))[0], str(party), str(own["metric"].iloc[0])]
        lines.append([*names, *cells])
    return text_table(heads, lines, left=3)


def _average(values: pd.Series[float]) -> str:
    if values.empty:
        return ""
    spread = f" ± {values.std():.3f}" if len(values) > 1 else ""
    return f"{values.mean():.3f}{spread}"


def _defense_lines(records: pd.DataFrame) -> Iterator[str]:
    """Yield what a defense guarantees and found, party by party."""
    series = records.query("step > 0 and party != ''").set_index("step")
    values = dict(list(series.groupby(["metric", "party"], sort=False)["value"]))
    for (metric, party), found in values.items():
        if metric == AUC_BOUND:
            yield (
                f"no attack on the gradients of {party} has an AUC above "
                f"{found.max():.3f} in any step, {found.mean():.3f} on average"
            )
        if metric == "withheld" and found.any():
            steps = f"{int(found.sum())} of {len(found)} steps"
            yield f"{party} got no gradient in {steps}"
        if metric == "suspected" and found.any():
            yield (
                f"{party} is suspected from step {found.idxmax()} on: its embeddings "
                f"move up to {values['response', party].max():.1f} times as far for "
                "its gradients as those of the other parties"
            )
