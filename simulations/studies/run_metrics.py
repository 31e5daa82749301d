"""What tables say about a run: its utility, its leakage and its cost as numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.transform import AUC_BOUND

_SPLITS = ("test", "valid", "train")
Document = Mapping[str, Any]


def utility_of(document: Document) -> tuple[str, float]:
    """Return the name and the value of the metric that a run is judged by."""
    final = document["final"]
    for split in _SPLITS:
        for metric in MAIN_METRIC.values():
            if f"{split}_{metric}" in final:
                return f"{split}_{metric}", final[f"{split}_{metric}"]
    return "", float("nan")


def leaks_of(document: Document) -> dict[str, dict[str, float]]:
    """Return the leak of every attack and party, 0.5 (ρ: 0) where nothing leaks.

    Of classes it is the leak AUC a, meant over the batches, or 1 − a if that is larger:
    an attack that is reliably wrong is right when reversed. Of a regression it is the
    mean of |ρ|.
    """
    found: dict[str, dict[str, float]] = {}
    values = is_regression(document)
    for party, attacks in document["leakage"].items():
        for attack, figures in attacks.items():
            if "mean" not in figures:  # every batch was of one class
                continue
            if values:
                leak = figures["flipped_mean"]
            else:
                leak = max(figures["mean"], 1.0 - figures["mean"])
            found.setdefault(attack, {})[party] = leak
    return found


def is_regression(document: Document) -> bool:
    """Return whether the labels of a run are values, not classes."""
    return utility_of(document)[0].endswith(MAIN_METRIC["regression"])


def worst_leaks(document: Document) -> dict[str, float]:
    """Return the leak of every attack to the single party that it tells most.

    Attacks on inner layers of a bottom model are left out.
    """
    worst = {}
    for attack, parties in leaks_of(document).items():
        single = [v for name, v in parties.items() if not {"/", "+"} & set(name)]
        if single and "@" not in attack:
            worst[attack] = max(single)
    return worst


def completions_in(document: Document) -> dict[str, float]:
    """Return the success of model completion, of the party that succeeds best."""
    entries = document.get("completion", [])
    texts = list(dict.fromkeys(entry["attack"] for entry in entries))
    names = [text.partition(":")[0] for text in texts]
    found = {}
    for text, name in zip(texts, names, strict=True):
        shown = name if names.count(name) == 1 else text
        for split in ("train", "test"):
            parties: dict[str, list[float]] = {}
            for entry in entries:
                if entry["attack"] == text and entry[split] is not None:
                    parties.setdefault(entry["party"], []).append(entry[split])
            if parties:
                best = max(map(statistics.mean, parties.values()))
                found[f"completion_{shown}_{split}"] = best
    return found


def bound_of(document: Document) -> float | None:
    """Return what the leak AUC of no attack exceeds, if the defense promises it."""
    bounds = [
        statistics.mean(series["values"])
        for name, series in document["series"].items()
        if name.startswith(f"{AUC_BOUND}/") and series["values"]
    ]
    return max(bounds, default=None)


def measures_of(document: Document) -> dict[str, Any]:
    """Return the columns of a run in the table of a study."""
    row: dict[str, Any] = {"utility": utility_of(document)[1], **document["final"]}
    row |= {f"leak_{attack}": value for attack, value in worst_leaks(document).items()}
    row |= _flipped(document)
    for attack, parties in leaks_of(document).items():
        row |= {f"leak_{attack}/{party}": value for party, value in parties.items()}
    bound = bound_of(document)
    row |= {} if bound is None else {"auc_bound": bound}
    row |= completions_in(document)
    row["seconds"] = document["seconds"]["total"]
    row["seconds_per_step"] = document["seconds"]["step"]
    row["workers"] = document.get("workers", 1)
    versions = document["versions"].items()
    return row | {f"version_{name}": version for name, version in versions}


def _flipped(document: Document) -> dict[str, float]:
    worst: dict[str, float] = {}
    for party, attacks in document["leakage"].items():
        if {"/", "+"} & set(party):
            continue
        for attack, figures in attacks.items():
            if "@" not in attack and "flipped_mean" in figures:
                name = f"flipped_leak_{attack}"
                worst[name] = max(worst.get(name, 0.0), figures["flipped_mean"])
    return worst
