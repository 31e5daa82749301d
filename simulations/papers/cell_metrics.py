"""Numbers that a table of a paper reads from a finished run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sklearn.neighbors import NearestNeighbors

from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.leakage.monitor import FLIPPED, LEAK
from flower_vfl.simulations.capture import CAPTURE_FILE, EMBEDDING, LABEL

Epochs = Literal["all", "first", "last"]
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "q95": lambda values: float(np.quantile(values, 0.95)),
}


@dataclass(frozen=True)
class Found:
    """A finished run."""

    document: Mapping[str, Any]
    folder: Path | None = None


def final(run: Found, metric: str) -> float:
    """Return a metric of the last evaluation."""
    known = run.document["final"]
    if metric not in known:
        raise unknown_name("metric", metric, known)
    return float(known[metric])


def series(
    run: Found,
    metric: str,
    statistic: str = "mean",
    epochs: Epochs = "all",
    parties: str = "mean",
    flipped: bool = False,
) -> float:
    """Return what was measured about the parties, summarised over steps."""
    if statistic not in STATISTICS:
        raise unknown_name("statistic", statistic, STATISTICS)
    named = (
        (label.partition("/"), values)
        for label, values in run.document["series"].items()
    )
    found = {label[2]: values for label, values in named if label[0] == metric}
    single = [party for party in found if not {"/", "+"} & set(party)]
    chosen = single if parties in ("mean", "max") else [parties]
    if not single:
        raise unknown_name("series", metric, _series_names(run))
    if not set(chosen) <= found.keys():
        raise unknown_name(f"party of '{metric}'", parties, found)
    summaries = [
        STATISTICS[statistic](_steps_of(run, found[party], epochs)) for party in chosen
    ]
    if flipped:
        summaries = [max(value, 1.0 - value) for value in summaries]
    return max(summaries) if parties == "max" else statistics.fmean(summaries)


def _steps_of(run: Found, values: Mapping[str, Any], epochs: Epochs) -> list[float]:
    """Return the values of some epochs."""
    counts = [int(epoch["steps"]) for epoch in run.document["epochs"]]
    low, high = 1, sum(counts)
    if epochs == "first":
        high = counts[0]
    elif epochs == "last":
        low = high - counts[-1] + 1
    steps = zip(values["steps"], values["values"], strict=True)
    chosen = [value for step, value in steps if low <= step <= high]
    if not chosen:
        raise ConfigError(f"nothing was measured in the {epochs} epochs of the run")
    return chosen


def _series_names(run: Found) -> list[str]:
    names = (name.partition("/")[0] for name in run.document["series"])
    return list(dict.fromkeys(names))


def leak(
    run: Found,
    attack: str,
    flipped: bool = True,
    statistic: str = "mean",
    epochs: Epochs = "all",
    parties: str = "mean",
    layers: Sequence[str] = (),
) -> float:
    """Return the leak AUC of a score attack."""
    if layers:
        measured = {name.rpartition("@")[2] for name in _series_names(run)}
        known = [layer for layer in layers if layer in measured]
        if not known:
            raise unknown_name("layer", layers[0], measured)
        attack = f"{attack}@{known[0]}"
    kind = FLIPPED if flipped else LEAK
    return series(run, f"{kind}_{attack}", statistic, epochs, parties)


def completion(
    run: Found, attack: str = "passive", split: str = "train", alone: bool = False
) -> float:
    """Return the success of model completion, mean over parties and repetitions."""
    entries = run.document.get("completion", [])
    name = f"labels_only_{split}" if alone else split
    values = [
        entry[name]
        for entry in entries
        if entry["attack"].partition(":")[0] == attack and entry[name] is not None
    ]
    if not values:
        kinds = {entry["attack"].partition(":")[0] for entry in entries}
        raise unknown_name("completion", attack, kinds)
    return statistics.fmean(values)


def epoch(run: Found, metric: str, epochs: Epochs = "all") -> float:
    """Return a metric of the training, mean over epochs; not a number if it has none."""
    history = run.document["epochs"]
    chosen = {"all": history, "first": history[:1], "last": history[-1:]}[epochs]
    values = [entry[metric] for entry in chosen if metric in entry]
    return statistics.fmean(values) if values else float("nan")


def seconds(
    run: Found, of: Literal["step", "defense", "epoch", "training", "total"] = "step"
) -> float:
    """Return how long something took."""
    spent = run.document["seconds"]
    if of == "epoch":
        return float(spent["training"]) / len(run.document["epochs"])
    return float(spent[of])


def neighbours(run: Found, party: str = "passive-1", k: int = 5) -> float:
    """Return how well the label is told by a party's nearest embeddings of test rows.

    Accuracy of a vote of the k nearest other rows: a number for what a t-SNE picture
    of the embeddings shows.
    """
    if run.folder is None or not (run.folder / CAPTURE_FILE).is_file():
        raise ConfigError("the run kept no embeddings: set capture")
    with np.load(run.folder / CAPTURE_FILE) as kept:
        rows, labels = kept[f"{EMBEDDING}/{party}"], kept[LABEL]
    # asked without rows, it leaves each row out of its own neighbours
    nearest = (
        NearestNeighbors(n_neighbors=k).fit(rows).kneighbors(return_distance=False)
    )
    votes = labels[nearest].astype(int)
    guessed = [np.bincount(own).argmax() for own in votes]
    return float(np.mean(guessed == labels))


def nothing(run: Found) -> float:
    """Return no number, for what the paper prints and is not measured here."""
    return float("nan")


def quotient(
    values: Mapping[str, float], of: Sequence[str], over: Sequence[str]
) -> float:
    """Return the mean of some columns over the mean of others."""
    below = statistics.fmean(values[name] for name in over)
    above = statistics.fmean(values[name] for name in of)
    return above / below if below else float("nan")


READINGS: dict[str, Callable[..., float]] = {
    "final": final,
    "series": series,
    "leak": leak,
    "completion": completion,
    "epoch": epoch,
    "seconds": seconds,
    "neighbours": neighbours,
    "nothing": nothing,
}
DERIVED: dict[str, Callable[..., float]] = {"quotient": quotient}
