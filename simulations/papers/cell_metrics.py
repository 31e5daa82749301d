"""Numbers that a table of a paper reads from a finished run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError, check_name, unknown_name
from flower_vfl.leakage.meter import FLIPPED, LEAK
from flower_vfl.simulations import capture
from flower_vfl.simulations.results import COMPLETION, LABELS_ONLY, RUN, final_metrics
from flower_vfl.specs import parse_spec

Epochs = Literal["all", "first", "last"]
STATISTICS: dict[str, Callable[[pd.Series[float]], float]] = {
    "mean": pd.Series.mean,
    "min": pd.Series.min,
    "max": pd.Series.max,
    "q95": lambda values: float(values.quantile(0.95)),
}


@dataclass(frozen=True)
class Found:
    """A finished run: its records, and its folder."""

    records: pd.DataFrame
    folder: Path | None = None


def final(run: Found, metric: str | Sequence[str]) -> float:
    """Return a metric of the last evaluation, the first of several that exists."""
    known = final_metrics(run.records.assign(**{RUN: ""})).set_index("name")["value"]
    sought = [metric] if isinstance(metric, str) else list(metric)
    name = next((name for name in sought if name in known), sought[-1])
    check_name("metric", name, known.index)
    return float(known[name])


def series(
    run: Found,
    metric: str,
    attack: str = "",
    layer: str = "",
    statistic: str = "mean",
    epochs: Epochs = "all",
    parties: str = "mean",
    flipped: bool = False,
) -> float:
    """Return what was measured about the parties, summarised over steps."""
    check_name("statistic", statistic, STATISTICS)
    measured = run.records.query("party != '' and step > 0")
    sought = {"metric": metric, "attack": attack, "layer": layer}
    found = measured[(measured[list(sought)] == pd.Series(sought)).all(axis=1)]
    single = found[~found["party"].str.contains("+", regex=False)]
    if single.empty:
        known = set(measured[list(sought)].agg(" ".join, axis=1))
        raise unknown_name("series", " ".join(sought.values()), known)
    if parties not in ("mean", "max"):
        check_name(f"party of '{metric}'", parties, set(found["party"]))
        single = found[found["party"] == parties]
    chosen = _of_epochs(single, epochs, run.records["epoch"].max())
    summaries = chosen.groupby("party")["value"].agg(STATISTICS[statistic])
    if flipped:
        summaries = summaries.clip(lower=1.0 - summaries)
    return float(summaries.max() if parties == "max" else summaries.mean())


def _of_epochs(found: pd.DataFrame, epochs: Epochs, last: int) -> pd.DataFrame:
    if epochs != "all":
        found = found[found["epoch"] == (1 if epochs == "first" else last)]
    if found.empty:
        raise ConfigError(f"nothing was measured in the {epochs} epochs of the run")
    return found


def leak(
    run: Found,
    attack: str,
    flipped: bool = True,
    statistic: str = "mean",
    epochs: Epochs = "all",
    parties: str = "mean",
    layers: Sequence[str] = (),
) -> float:
    """Return the leak AUC of a score attack, at the first of the layers that exists."""
    measured = set(run.records["layer"])
    known = [layer for layer in layers if layer in measured]
    if layers and not known:
        raise unknown_name("layer", layers[0], measured - {""})
    layer = known[0] if known else ""
    kind = FLIPPED if flipped else LEAK
    return series(run, kind, attack, layer, statistic, epochs, parties)


def completion(
    run: Found, attack: str = "passive", split: str = "train", alone: bool = False
) -> float:
    """Return the success of model completion, mean over parties and repetitions."""
    found = run.records[run.records["metric"] == (LABELS_ONLY if alone else COMPLETION)]
    found = found[found["split"] == split]
    names = found["attack"].map(lambda text: parse_spec(text)[0])
    check_name("completion", attack, set(names))
    return float(found["value"][names == attack].mean())


def epoch(
    run: Found, metric: str, epochs: Epochs = "all", statistic: str = "mean"
) -> float:
    """Return a training metric over epochs; not a number if there is none."""
    check_name("statistic", statistic, STATISTICS)
    history = run.records.query("split == 'train' and step == 0 and epoch > 0")
    chosen = _of_epochs(history, epochs, history["epoch"].max())
    return float(STATISTICS[statistic](chosen["value"][chosen["metric"] == metric]))


def seconds(
    run: Found, of: Literal["step", "defense", "epoch", "training", "total"] = "step"
) -> float:
    """Return how long something took."""
    sought = f"metric == 'seconds_{of}'"
    if of == "epoch":
        sought = "metric == 'seconds' and step == 0 and epoch > 0"
    return float(run.records.query(sought)["value"].mean())


def _kept(run: Found, *names: str) -> list[NDArray[Any]]:
    """Return arrays that a run captured."""
    if run.folder is None or not (run.folder / capture.CAPTURE_FILE).is_file():
        raise ConfigError("the run kept no rows: set capture")
    with np.load(run.folder / capture.CAPTURE_FILE) as kept:
        return [kept[name] for name in names]


def row_sum(run: Found, part: str) -> float:
    """Return the mean sum of a row of a part of GAFM's gradient, in the last batch."""
    [gradient] = _kept(run, f"{capture.PART}/{part}")
    return float(gradient.sum(axis=1).mean())


def neighbours(run: Found, party: str = "passive-1", k: int = 5) -> float:
    """Return the accuracy of a vote of the k nearest embeddings of other test rows."""
    from sklearn.neighbors import NearestNeighbors

    rows, labels = _kept(run, f"{capture.EMBEDDING}/{party}", capture.LABEL)
    # asked without rows, it leaves each row out of its own neighbours
    known = NearestNeighbors(n_neighbors=k).fit(rows)
    votes = labels[known.kneighbors(return_distance=False)].astype(int)
    return float(np.mean([np.bincount(own).argmax() for own in votes] == labels))


def sent(run: Found, party: str = "passive-1") -> float:
    """Return Pearson's rho of the label and the one column sent for test rows."""
    rows, labels = _kept(run, f"{capture.EMBEDDING}/{party}", capture.LABEL)
    return float(np.corrcoef(rows[:, 0], labels)[0, 1])


def decisions(run: Found, split: Literal["train", "test"] = "test") -> float:
    """Return the AUC of decisions at 0.5, which is the balanced accuracy."""
    from sklearn.metrics import roc_auc_score

    names = [capture.PREDICTION, capture.LABEL]
    if split == "train":
        parts = capture.GRADIENT_PREDICTION, capture.GRADIENT_LABEL
        names = [f"{part}/passive-1" for part in parts]
    predictions, labels = _kept(run, *names)
    return float(roc_auc_score(labels, predictions.reshape(-1) > 0.5))


def separation(run: Found, party: str = "passive-1", norms: bool = False) -> float:
    """Return how many deviations the class means of gradients, or norms, are apart."""
    parts = capture.GRADIENT, capture.GRADIENT_LABEL
    rows, labels = _kept(run, *(f"{part}/{party}" for part in parts))
    found = np.linalg.norm(rows, axis=1, keepdims=True) if norms else rows
    one, other = found[labels == 1], found[labels == 0]
    within = np.sqrt((one.var(axis=0).sum() + other.var(axis=0).sum()) / 2.0)
    return float(np.linalg.norm(one.mean(axis=0) - other.mean(axis=0)) / within)


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


def spread(values: Mapping[str, float], of: Sequence[str]) -> float:
    """Return how far the largest and the smallest of some columns are apart."""
    chosen = [values[name] for name in of]
    return max(chosen) - min(chosen)


READINGS: dict[str, Callable[..., float]] = {"final": final, "series": series}
READINGS |= {"leak": leak, "completion": completion, "epoch": epoch}
READINGS |= {"seconds": seconds, "neighbours": neighbours, "sent": sent}
READINGS |= {"decisions": decisions, "separation": separation}
READINGS |= {"row_sum": row_sum, "nothing": nothing}
DERIVED: dict[str, Callable[..., float]] = {"quotient": quotient, "spread": spread}
