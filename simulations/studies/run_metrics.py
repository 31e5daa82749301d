"""Utility, leakage and model completion of runs, as queries of ``results.tables``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.privacy.accountant import RUN_AUC_BOUND
from flower_vfl.simulations.results import COMPLETION, RUN, final_metrics, kept_for_last
from flower_vfl.specs import parse_spec
from flower_vfl.strategies.state import mean_leaks, of_an_epoch
from flower_vfl.transform import AUC_BOUND

BEYOND_MODEL = "beyond_model"
# Figures of a whole training, and their heads in tables.
CANARIES = "canary_auc_low"
WHOLE_RUN = {
    BEYOND_MODEL: "beyond the model",
    CANARIES: "canaries at least",
    RUN_AUC_BOUND: "bound of the run",
}
_SPLITS = ("test", "valid", "train")


@kept_for_last
def utilities(records: pd.DataFrame) -> pd.DataFrame:
    """Return the main metric of each run: name, metric, value, regression."""
    found = final_metrics(records)
    metrics = list(MAIN_METRIC.values())
    found = found[found["metric"].isin(metrics)]
    order = found["split"].map(_SPLITS.index) * len(metrics)
    found = found.assign(order=order + found["metric"].map(metrics.index))
    found = found.sort_values("order", kind="stable").drop_duplicates(RUN)
    found = found.assign(regression=found["metric"] == MAIN_METRIC["regression"])
    return found.set_index(RUN)[["name", "metric", "value", "regression"]]


def main_metric(records: pd.DataFrame) -> str:
    """Return the name of the metric that runs are judged by, or an empty text."""
    names = utilities(records)["name"]
    return "" if names.empty else str(names.iloc[0])


@kept_for_last
def leaks(records: pd.DataFrame) -> pd.DataFrame:
    """Return the leak of every attack on every party, 0.5 (ρ: 0) where nothing leaks.

    It is the mean leak AUC a over the batches, or 1 − a if that is larger: an attack
    that is reliably wrong is right when reversed. For a regression it is the mean of
    |ρ|, and for an attack on an epoch that of the last one. `flipped` is the mean of
    batches that were flipped one by one, `random` marks random gradients, `coalition`
    parties that share theirs, and `beyond` is the leak beyond the model's predictions.
    """
    wide = mean_leaks(records, utilities(records)["regression"], RUN)
    coalition = wide["party"].str.contains("+", regex=False)
    known = final_metrics(records)
    known = known[known["name"] == "train_model_leak"]
    told = known.drop_duplicates(RUN).set_index(RUN)["value"]
    model = wide[RUN].map(told).astype("float64")  # also where there is no leak
    beyond = (wide["leak"] - model).where(of_an_epoch(wide["attack"]))
    return wide.assign(coalition=coalition, beyond=beyond)


@kept_for_last
def largest_leaks(records: pd.DataFrame) -> pd.DataFrame:
    """Return what each attack finds at the party where it finds most, by run."""
    found = leaks(records)
    found = found[(found["layer"] == "") & ~found["random"] & ~found["coalition"]]
    kinds = ["leak", "flipped", "beyond"]
    return found.groupby([RUN, "attack"], sort=False)[kinds].max().reset_index()


def over_training(records: pd.DataFrame) -> pd.DataFrame:
    """Return what a stale attack finds beyond the model, and the AUC bound, by run."""
    beyond = largest_leaks(records).groupby(RUN)["beyond"].max()
    ordered = records.sort_values(["epoch", "step"]).groupby([RUN, "metric"])["value"]
    last = ordered.last().unstack("metric")
    last = last.reindex(columns=[CANARIES, RUN_AUC_BOUND])
    found = last.assign(**{BEYOND_MODEL: beyond})[list(WHOLE_RUN)]
    return found.dropna(axis="columns", how="all")


def shown_whole(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return which figures of whole trainings a table with a stale attack shows."""
    known = {name for row in rows for name in row}
    shown = WHOLE_RUN if BEYOND_MODEL in known else {}
    return {name: head for name, head in shown.items() if name in known}


def completions(records: pd.DataFrame) -> pd.DataFrame:
    """Return the success of model completion of the best party, by run and split.

    Its column `attack` has no parameters, unless a run has two attacks of one name.
    """
    found = records[records["metric"] == COMPLETION]
    names = found["attack"].map(lambda text: parse_spec(text)[0])
    texts = found.groupby([found[RUN], names])["attack"].transform("nunique")
    found = found.assign(attack=names.where(texts == 1, found["attack"]))
    means = found.groupby([RUN, "attack", "split", "party"], sort=False)["value"].mean()
    return means.groupby([RUN, "attack", "split"], sort=False).max().reset_index()


def bounds(records: pd.DataFrame) -> pd.Series[float]:
    """Return the AUC that no attack exceeds, for runs whose defense guarantees one."""
    found = records[records["metric"] == AUC_BOUND]
    means = found.groupby([RUN, "party"])["value"].mean()
    return means.groupby(RUN).max()


def whole_run(records: pd.DataFrame, metric: str) -> pd.Series[float]:
    """Return a number that each run has once, e.g. ``seconds_step``."""
    found = records[(records["metric"] == metric) & (records["epoch"] == 0)]
    return found.set_index(RUN)["value"]


def run_columns(records: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each run: the columns of a study's table."""
    found, worst, done = leaks(records), largest_leaks(records), completions(records)
    layer = ("@" + found["layer"]).where(found["layer"] != "", "")
    random = pd.Series("/random", found.index).where(found["random"], "")
    names = "leak_" + found["attack"] + layer + "/" + found["party"] + random
    parts = [
        utilities(records).reset_index().assign(name="utility"),
        final_metrics(records),
        worst.assign(name="leak_" + worst["attack"], value=worst["leak"]),
        worst.assign(name="flipped_leak_" + worst["attack"], value=worst["flipped"]),
        found.assign(name=names, value=found["leak"]),
        bounds(records).reset_index().assign(name="auc_bound"),
        done.assign(name="completion_" + done["attack"] + "_" + done["split"]),
    ]
    for metric, name in (("total", "seconds"), ("step", "seconds_per_step")):
        found = whole_run(records, f"seconds_{metric}").reset_index()
        parts.append(found.assign(name=name))
    whole = pd.concat([part[[RUN, "name", "value"]] for part in parts])
    whole = whole.drop_duplicates([RUN, "name"])  # training rows may be evaluated twice
    wide = whole.pivot(index=RUN, columns="name", values="value")
    wide = wide[list(whole["name"].unique())].rename_axis(columns=None)
    return wide.join(over_training(records))
