"""What defenses trade, which runs trained, and which defense to choose.

Privacy is 2·(1 − a) with a the largest leak AUC of all attacks, or 1 − |ρ| for a
regression. Utility is 2·(AUC − 0.5), the accuracy, or ρ. Both are means over seeds and
lie between 0 and 1; leaks are averaged before the largest is taken. The curve is the
staircase through the points that no other point beats in both. The area under it is the
dominated hypervolume of the points with (0, 0) as the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.simulations.printing import metric_name
from flower_vfl.simulations.results import GUESS, RUN

from . import run_metrics
from .methods import VANILLA

if TYPE_CHECKING:
    from .study import Study

SEED, DEFENSE = "seed", "defense"
Row = Mapping[str, Any]
_GUESSES = {MAIN_METRIC["binary"]: 0.5, MAIN_METRIC["regression"]: 0.0}
_LEAST = 0.1  # of the way from a guess to a perfect model
_DIVERGED = 10.0  # times the loss of the first epoch
_HELPS = 0.02  # by which a defense has to lower the largest leak


def privacy(leaks: Mapping[str, float], regression: bool = False) -> float:
    """Return how little the attack that finds most does find, from 0 to 1."""
    worst = max(leaks.values())
    return _unit(1.0 - worst if regression else 2.0 * (1.0 - worst))


def usefulness(metric: str, value: float) -> float:
    """Return a utility from 0, for what guessing reaches, to 1."""
    return _unit(2.0 * (value - 0.5) if metric == MAIN_METRIC["binary"] else value)


def _unit(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def staircase(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats, by growing privacy."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    return kept[::-1]


def area(points: Sequence[tuple[float, float]]) -> float:
    """Return the area under the staircase of some points, for privacy from 0 to 1."""
    total, before = 0.0, 0.0
    for x, y in staircase(points):
        total += (x - before) * y
        before = x
    return total


def tradeoff_points(records: pd.DataFrame, settings: pd.Series[Any]) -> pd.DataFrame:
    """Return privacy (x) and utility (y) of each setting, means over its runs.

    A run without an evaluation or without an attack is left out.
    """
    found, leaks = run_metrics.utilities(records), run_metrics.largest_leaks(records)
    trained = run_metrics.over_training(records)
    found = found[np.isfinite(found["value"]) & found.index.isin(leaks[RUN])]
    points = {}
    for setting, own in found.groupby(settings.reindex(found.index), sort=False):
        means = leaks[leaks[RUN].isin(own.index)].groupby("attack", sort=False)["leak"]
        by_attack = {str(attack): float(leak) for attack, leak in means.mean().items()}
        first, utility = own.iloc[0], float(own["value"].mean())
        points[setting] = {
            "name": first["name"],
            "utility": utility,
            "leaks": by_attack,
            "x": privacy(by_attack, first["regression"]),
            "y": usefulness(first["metric"], utility),
            "seeds": len(own),
        }
        whole = trained.reindex(own.index).mean().dropna()
        points[setting] |= {str(name): value for name, value in whole.items()}
    return pd.DataFrame.from_dict(points, orient="index")


def tradeoff(study: Study) -> dict[str, Any]:
    """Return the curves of a study as they stand in ``study.json``."""
    labels = study.labels().drop(columns=SEED, errors="ignore")
    labels = labels.assign(**{DEFENSE: labels.get(DEFENSE, "none")})
    settings = labels.groupby(list(labels), sort=False, dropna=False).ngroup()
    records = study.records()
    found = tradeoff_points(records, settings).drop(columns="name", errors="ignore")
    why = untrained(records)[lambda reasons: reasons != ""].groupby(settings).first()
    found = found.assign(did_not_train=why.reindex(found.index))
    points: dict[str, list[dict[Any, Any]]] = {}
    for setting, point in found.to_dict("index").items():
        own = {str(n): v for n, v in labels[settings == setting].iloc[0].items()}
        own = {name: str(value) for name, value in own.items() if pd.notna(value)}
        point = {key: value for key, value in point.items() if value == value}
        points.setdefault(own.pop(DEFENSE), []).append({"labels": own} | point)
    curves: dict[str, dict[str, Any]] = {}
    for defense, listed in points.items():
        places = [(point["x"], point["y"]) for point in listed]
        size = {"area": area(places), "curve": staircase(places)}
        curves[defense] = size | {"points": listed}
    ranked = sorted(curves.items(), key=lambda item: -item[1]["area"])
    return {"metric": run_metrics.main_metric(records), "curves": dict(ranked)}


def untrained(records: pd.DataFrame) -> pd.Series[str]:
    """Return why each run did not train; an empty text for one that did.

    A run did not train if its utility goes less than a tenth of the way from a guess to
    a perfect model, or if its last loss is not finite or above ten times the first.
    """
    found = run_metrics.utilities(records)
    known = found["metric"].map(_GUESSES).astype("float64")
    guess = known.fillna(run_metrics.whole_run(records, GUESS)).fillna(0.0)
    trained = found["value"] > guess + _LEAST * (1.0 - guess)
    why = pd.Series("", records[RUN].unique(), dtype=str).rename_axis(RUN)
    why[found.index[~trained]] = "no better than a guess"
    losses = records.query("metric == 'loss' and split == 'train' and step == 0")
    ordered = losses.sort_values("epoch").set_index(RUN)["value"]
    first = ordered[~ordered.index.duplicated()].abs().clip(lower=1.0)
    last = ordered[~ordered.index.duplicated(keep="last")]
    grown = ~np.isfinite(last) | last.gt(_DIVERGED * first.reindex(last.index))
    why[grown.index[grown]] = "its loss diverged"
    return why


def comparison(study: Study) -> dict[str, Any]:
    """Return a study as a table: one row for each setting that has a finished run."""
    records = study.records()
    methods = study.labels().drop(columns=SEED, errors="ignore").apply(_setting, axis=1)
    done = run_metrics.completions(records).query("split == 'test'")
    leaks = run_metrics.largest_leaks(records).rename(columns={"leak": "value"})
    found = pd.concat([leaks, done]).assign(method=lambda part: part[RUN].map(methods))
    means = found.iloc[: len(leaks)].groupby(["method", "attack"])["value"].mean()
    steps = run_metrics.whole_run(records, "seconds_step").rename("step").to_frame()
    # a run without an evaluation has a utility that is not a number
    runs = steps.join(run_metrics.utilities(records)[["metric", "value", "regression"]])
    trained = run_metrics.over_training(records)
    runs = runs.join(trained).join(methods.rename("method"))
    runs = runs.assign(untrained=untrained(records))
    vanilla = runs["step"][runs["method"] == VANILLA].median()
    rows = []
    for method, own in runs.groupby("method", sort=False):
        attacks = found[found["method"] == method].groupby("attack", sort=False)
        step, failed = float(own["step"].median()), own["untrained"][lambda t: t != ""]
        part = f"{len(failed)} of {len(own)} runs: " if len(failed) < len(own) else ""
        row: dict[str, Any] = {
            "defense": method,
            "runs": len(own),
            "utility": summary(own["value"]),
            "untrained": "" if failed.empty else part + failed.iloc[0],
            "leaks": {attack: summary(part["value"]) for attack, part in attacks},
            **{str(n): summary(own[n]) for n in trained if own[n].notna().any()},
            "seconds_per_step": step,
            "time_ratio": step / float(vanilla) if vanilla > 0 else None,
        }
        if method in means and own["value"].notna().any():
            largest, first = means[method], own.iloc[0]
            private = privacy(dict(largest), bool(first["regression"]))
            useful = usefulness(first["metric"], row["utility"]["mean"])
            row |= {"largest_leak": float(largest.max()), "area": private * useful}
            row["largest_attack"] = str(largest.idxmax())
        rows.append(row)
    errors = list(study.errors.values())
    metric = run_metrics.main_metric(records)
    return {"title": study.title, "metric": metric, "rows": rows, "errors": errors}


def _setting(labels: pd.Series[str]) -> str:
    """Return a defense, and what else was varied."""
    known = {str(name): value for name, value in labels.dropna().items()}
    defense = known.pop(DEFENSE, VANILLA)
    varied = [f"{name.rpartition('.')[2]}={value}" for name, value in known.items()]
    return ", ".join([defense, *varied])


def summary(values: pd.Series[float]) -> dict[str, float]:
    """Return mean, standard deviation, least and largest of some values."""
    found = values.agg(["mean", "std", "min", "max"]).rename({"std": "sd"})
    return {str(n): float(value) for n, value in found.fillna({"sd": 0.0}).items()}


def verdict(document: Row, target: float | None = None) -> Iterator[str]:
    """Yield what a comparison amounts to, in sentences: first what to choose.

    Of the methods that trained, the choice has the largest product of privacy and
    utility, or with a `target` the best utility of those that leak at most that.
    """
    if not document["metric"]:
        remedy = "set --test-fraction above 0"
        yield f"Nothing was evaluated, so no defense can be recommended: {remedy}."
    metric = metric_name(document["metric"])
    rows: Sequence[Row] = [row for row in document["rows"] if "area" in row]
    plain = next((row for row in rows if row["defense"] == VANILLA), None)
    leak = math.inf if plain is None else plain["largest_leak"]
    failed = [row for row in document["rows"] if row.get("untrained")]
    good = [row for row in rows if row is not plain and row not in failed]
    limit = leak - _HELPS if target is None else target
    kept = [row for row in good if row["largest_leak"] <= limit]
    if plain is not None and plain in failed:
        failure = f"does not train even without a defense ({plain['untrained']})"
        yield f"The model {failure}: change its settings or its data first."
    elif target is not None and leak <= target:
        yield f"No defense is needed: without one the largest leak is {leak:.2f}."
    elif kept:
        by_area, by_utility = (lambda r: r["area"]), (lambda r: r["utility"]["mean"])
        best = max(kept, key=by_area if target is None else by_utility)
        yield f"Choose {_described(best, plain, metric)}."
    elif good and target is None:
        yield f"No defense helps: none lowers the largest leak, {leak:.2f}."
    elif good:
        closest = min(good, key=lambda row: row["largest_leak"])
        near = f"closest is {_described(closest, plain, metric)}"
        yield f"No defense keeps the largest leak at or below {target:g}; {near}."
    parts: dict[str, list[str]] = {}
    for row in failed:
        some, _, _ = row["untrained"].rpartition(" runs:")
        where = f"in {some} runs" if some else "on this data"
        parts.setdefault(where, []).append(row["defense"])
    for where, names in parts.items():
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        yield f"{listed} did not train {where}."


def _described(row: Row, plain: Row | None, metric: str) -> str:
    """Return what a method changes, or what it reaches if nothing is beside it."""
    leak, utility = row["largest_leak"], row["utility"]["mean"]
    if plain is None:
        return f"{row['defense']}: largest leak {leak:.2f}, {metric} {utility:.3f}"
    cost = f"{utility - plain['utility']['mean']:+.3f}".replace("-", "−")
    cost = "unchanged" if cost[1:] == "0.000" else cost
    change = f"{plain['largest_leak']:.2f} → {leak:.2f}"
    return f"{row['defense']}: largest leak {change}, {metric} {cost}"
