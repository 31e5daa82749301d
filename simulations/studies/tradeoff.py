"""Privacy against utility, and the area under that curve: one number per defense.

Privacy is 2·(1 − a) with a the largest leak AUC of all attacks, or 1 − |ρ| for a
regression. Utility is 2·(AUC − 0.5), the accuracy, or ρ. Both are means over seeds and
lie between 0 and 1; leaks are averaged before the largest is taken. The curve is the
staircase through the points that no other point beats in both. The area under it is the
dominated hypervolume of the points with (0, 0) as the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.simulations.results import RUN

from .run_metrics import largest_leaks, main_metric, over_training, utilities

if TYPE_CHECKING:
    from .study import Study

SEED, DEFENSE = "seed", "defense"


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
    """Return the area under the staircase of some points, for privacy from 0 to 1.

    Examples
    --------
    >>> area([(0.5, 1.0), (1.0, 0.5)])
    0.75
    """
    total, before = 0.0, 0.0
    for x, y in staircase(points):
        total += (x - before) * y
        before = x
    return total


def tradeoff_points(records: pd.DataFrame, settings: pd.Series[Any]) -> pd.DataFrame:
    """Return privacy (x) and utility (y) of each setting, means over its runs.

    `settings` has the setting of each run. A run without an evaluation or without an
    attack is left out.
    """
    found, leaks = utilities(records), largest_leaks(records)
    trained = over_training(records)
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
    found = tradeoff_points(study.records(), settings).drop(columns="name")
    if study.finished:
        why = study.frame().set_index("key")["did_not_train"]
        why = why[why != ""].groupby(settings).first()
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
        curves[defense] = {
            "area": area(places),
            "curve": staircase(places),
            "points": listed,
        }
    ranked = sorted(curves.items(), key=lambda item: -item[1]["area"])
    return {"metric": main_metric(study.records()), "curves": dict(ranked)}
