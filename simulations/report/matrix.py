"""Figures and tables of a matrix: defenses, attacks, datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd

from flower_vfl.simulations.studies.matrix import ALL, GUESS, common_datasets, ranking
from flower_vfl.simulations.studies.methods import VANILLA
from flower_vfl.specs import parse_spec

from .charts import Axis, Figure, heat_map
from .tables import Cell, Table, number

LEAK = Axis("leak AUC", (GUESS, 1.0))
_BEST = 3
_RANKED = {"rank": 0, "dcs": 3, "leak": 3, "largest_leak": 3}
_RANKED |= {"utility": 3, "utility_none": 3}  # digits


def matrix_sections(cells: pd.DataFrame) -> dict[str, tuple[list[Figure], list[Table]]]:
    """Return what the page of a matrix shows."""
    found = ranking(cells)
    heads = ["", *(f"{place + 1}." for place in range(_BEST))]
    names = [str(name) for name in found["dataset"].unique()]
    empty: list[list[Cell]] = [[(n, None), *[("", None)] * _BEST] for n in names]
    best = Table("Best three defenses", heads, empty, parties=names)
    figures, ranked = [overview(found), *heat_maps(cells)], ranking_table(found)
    return {"best": ([], [best]), "matrix": (figures, []), "ranking": ([], [ranked])}


def overview(found: pd.DataFrame) -> Figure:
    """Return the mean DCS of each method on each dataset, for any weight."""
    frame = found.drop(columns="setting").rename(columns={"method": "setting"})
    frame = frame.sort_values("dataset", key=lambda names: names != ALL, kind="stable")
    frame = frame.assign(key=frame["dataset"] + "/" + frame["setting"])
    scores = dict(zip(frame["key"], frame["dcs"].round(4), strict=True))
    frame, value = frame[["setting", "dataset", "key"]], Axis("DCS", (0.6, 1.0))
    chart = heat_map(frame, "dataset", value, "DCS by dataset", scores)
    return Figure("dcs", chart, "Score of each defense for the chosen weight")


def heat_maps(cells: pd.DataFrame) -> list[Figure]:
    """Return the leak of each attack on each method, a chart for each dataset."""
    short = short_attacks(cells["attack"].unique())
    figures = []
    for dataset, frame in leak_means(cells).groupby("dataset", sort=False):
        own = frame.assign(attack=frame["attack"].map(short), value=frame["leak"])
        own = own.rename(columns={"method": "setting", "setting": "details"})
        own = own[["setting", "attack", "value", "details"]].round(4)
        chart = heat_map(own, "attack", LEAK, f"Leak AUC on {dataset}")
        name = f"heat-map-{dataset}"
        figures.append(Figure(name, chart, str(dataset), party=str(dataset)))
    return figures


def leak_means(cells: pd.DataFrame) -> pd.DataFrame:
    """Return leaks as means over seeds, the methods of a matrix by rank."""
    order = ["dataset", "method", "setting", "attack"]
    means = cells.groupby(order, sort=False)["leak"].agg(["mean", "std", "size"])
    means = means.set_axis(["leak", "sd", "seeds"], axis=1).reset_index()
    if "utility_none" not in cells:
        return means
    ranks = ranking(cells).set_index(["dataset", "method"])["rank"]
    ranks = means.join(ranks, on=["dataset", "method"])["rank"]
    places = {name: place for place, name in enumerate(cells["attack"].unique())}
    means = means.assign(rank=ranks, place=means["attack"].map(places))
    means = means.sort_values(["rank", "place"], kind="stable")
    return means.drop(columns=["rank", "place"])


def short_attacks(attacks: Iterable[str]) -> dict[str, str]:
    """Return attacks without their parameters, where their names still differ."""
    names = {attack: parse_spec(attack)[0] for attack in attacks}
    known = Counter(names.values())
    return {a: name if known[name] == 1 else a for a, name in names.items()}


def ranking_table(found: pd.DataFrame) -> Table:
    """Return a row for each method of each dataset."""
    rows: list[list[Cell]] = []
    for each in found.to_dict("records"):
        mark = "\n(did not train)" if each["untrained"] else ""
        row: list[Cell] = [(f"{each['method']}{mark}", None), (each["dataset"], None)]
        row.append((each["setting"] if each["setting"] != each["method"] else "", None))
        row += [number(each[name], digits) for name, digits in _RANKED.items()]
        row.insert(-2, (each["largest_attack"].partition(":")[0], None))
        rows.append(row)
    heads = ["defense", "dataset", "setting", "rank", "DCS", "mean leak"]
    heads += ["largest leak", "by", "utility", "without a defense"]
    settings = [[name] for name in found["method"]]
    parties = list(found["dataset"])
    return Table("All defenses", heads, rows, settings, parties=parties)


def ranked_data(cells: pd.DataFrame) -> dict[str, Any]:
    """Return what the page's script needs to rank methods for any weight.

    `gaps` are, by attack and seed, how far the leak is above a guess and the utility
    below that without a defense.
    """
    found = ranking(cells)
    gaps = cells.assign(
        found=(cells["leak"] - GUESS).clip(lower=0.0),
        lost=(cells["utility_none"] - cells["utility"]).clip(lower=0.0),
    )
    groups = [
        {
            "dataset": dataset,
            "method": method,
            "gaps": own[["found", "lost"]].round(6).to_numpy().tolist(),
            "failed": bool((own["untrained"] != "").any()),
        }
        for (dataset, method), own in gaps.groupby(["dataset", "method"], sort=False)
    ]
    names = {"all": ALL, "none": VANILLA, "common": common_datasets(found)}
    datasets = [name for name in found["dataset"].unique() if name != ALL]
    return {**names, "datasets": datasets, "groups": groups}
