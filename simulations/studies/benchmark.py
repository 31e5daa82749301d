"""The page ``docs/benchmark.md``: what a finished matrix found, in Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.printing import markdown_table, metric_name
from flower_vfl.simulations.results import tables

from .matrix import ALL, REPORTED, STAGE, TUNING, cells, common_datasets, ranking
from .methods import VANILLA
from .run_metrics import main_metric
from .study import Study

_SCORES = ["DCS", "mean leak", "largest leak", "utility", "change"]


def benchmark_page(study: Study) -> str:
    """Return the page of a matrix that has finished runs."""
    found = cells(study)
    if found.empty:
        raise ConfigError(f"'{study.folder}' has no finished run to report yet")
    ranked = ranking(found)
    whole = ranked[ranked["dataset"] == ALL]
    trained = whole[(whole["untrained"] == "") & (whole["method"] != VANILLA)]
    datasets = ranked[ranked["dataset"] != ALL].groupby("dataset", sort=False)
    documents = [study.documents[key] for key in study.finished]
    stages = study.labels().loc[study.finished, STAGE]
    spent = [document["seconds"] for document in documents]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"listed": _listed, "signed": _signed}
    known: dict[str, Any] = {"command": "", "workers": 1, "wall_seconds": 0.0}
    return environment.get_template("benchmark.md").render(
        best=next(iter(trained.to_dict("records")), None),
        plain=whole.set_index("method").loc[VANILLA],
        methods=len(whole) - 1,
        attacks=found["attack"].nunique(),
        seeds=sorted(found["seed"].unique()),
        shared=common_datasets(ranked),
        defended=_least_stopped(found),
        extra=known | study.extra,
        stages={TUNING: 0, REPORTED: 0} | dict(stages.value_counts()),
        total=sum(each["total"] + each.get("completion", 0.0) for each in spent),
        config=documents[0]["config"],
        versions=documents[0]["versions"],
        over_all=_table(whole, ["method"]),
        attack_table=_attack_table(found, ranked),
        datasets=[_dataset(study, str(name), own) for name, own in datasets],
        tuning=_tuning(study, found),
    )


def _listed(names: Any) -> str:
    *first, last = [f"`{name}`" for name in names]
    return " and ".join(filter(None, [", ".join(first), last]))


def _signed(change: float) -> str:
    return f"{round(change, 3) + 0.0:+.3f}".replace("-", "−")  # there is no −0


def _least_stopped(found: pd.DataFrame) -> dict[str, Any] | None:
    """Return the attack that finds most behind defenses, and what it finds."""
    plain = found["method"] == VANILLA
    means = found[~plain & (found["untrained"] == "")].groupby("attack")["leak"].mean()
    if means.empty:
        return None
    attack = str(means.idxmax())
    undefended = found["leak"][plain & (found["attack"] == attack)].mean()
    return {"attack": attack, "leak": means.max(), "plain": undefended}


def _table(ranked: pd.DataFrame, names: list[str]) -> str:
    """Return the methods of one dataset, the best first."""
    rows = []
    for row in ranked.to_dict("records"):
        left = [f"`{row[name]}`" for name in names]
        left[0] += " (did not train)" if row["untrained"] else ""
        largest = f"{row['largest_leak']:.2f}"
        largest += f" `{row['largest_attack']}`" if row["largest_attack"] else ""
        change = _signed(row["utility"] - row["utility_none"])
        figures = [f"{row['dcs']:.3f}", f"{row['leak']:.2f}", largest]
        figures += [f"{row['utility']:.3f}", change]
        rows.append([str(row["rank"]), *left, *figures])
    return markdown_table(["", *names, *_SCORES], rows, left=1 + len(names))


def _attack_table(found: pd.DataFrame, ranked: pd.DataFrame) -> str:
    """Return the mean leak of every attack on every method, the best method first."""
    order = ranked.loc[ranked["dataset"] == ALL, "method"]
    wide = found.groupby(["method", "attack"], sort=False)["leak"].mean().unstack()
    wide = wide.loc[order, found["attack"].unique()]
    rows = [
        [f"`{method}`", *(f"{value:.2f}" if value == value else "" for value in row)]
        for method, row in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    return markdown_table(["method", *(f"`{name}`" for name in wide)], rows)


def _dataset(study: Study, name: str, own: pd.DataFrame) -> dict[str, Any]:
    """Return what the section of a dataset shows."""
    labels = study.labels().loc[study.finished]
    first = str(labels.index[labels["dataset"] == name][0])
    return {
        "name": name,
        "metric": metric_name(main_metric(tables({first: study.documents[first]}))),
        "table": _table(own, ["method", "setting"]),
        "left_out": study.extra.get("left_out", {}).get(name, {}),
    }


def _tuning(study: Study, found: pd.DataFrame) -> dict[str, Any]:
    """Return how the settings were chosen, and which were tried."""
    labels = study.labels()
    tuned = labels[labels[STAGE] == TUNING]
    tried = tuned.groupby("method", sort=False)["defense"].unique().drop(VANILLA)
    rows = [[f"`{name}`", _listed(settings)] for name, settings in tried.items()]
    tuned_or_none = {VANILLA, *tried.index}
    return {
        "seed": tuned["seed"].iloc[0],
        "attacks": cells(study, TUNING)["attack"].unique(),
        "fixed": [m for m in found["method"].unique() if m not in tuned_or_none],
        "table": markdown_table(["method", "settings"], rows, left=2),
    }
