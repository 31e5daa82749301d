"""Privacy against utility, and the area under that curve: one number per defense.

Privacy is 2·(1 − a) with a the largest leak AUC of all attacks, or 1 − |ρ| for a
regression. Utility is 2·(AUC − 0.5), the accuracy, or ρ. Both are means over seeds and
lie between 0 and 1; leaks are averaged before the largest is taken. The curve is the
staircase through the points that no other point beats in both. The area under it is the
dominated hypervolume of the points with (0, 0) as the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.simulations.results import RUN

from .run_metrics import largest_leaks, main_metric, utilities
from .study import Study

SEED, DEFENSE = "seed", "defense"


@dataclass(frozen=True)
class Point:
    """What one setting gives, over all seeds."""

    labels: dict[str, str]
    utility: float
    leaks: dict[str, float]
    x: float
    y: float
    seeds: int


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


def points_of(study: Study) -> dict[str, list[Point]]:
    """Return the points of every defense of a study."""
    records = study.records()
    found, leaks = utilities(records), largest_leaks(records)
    found = found[np.isfinite(found["value"]) & found.index.isin(leaks[RUN])]
    labels = study.labels().drop(columns=SEED, errors="ignore")
    labels = labels[labels.index.isin(found.index)]
    labels = labels.assign(**{DEFENSE: labels.get(DEFENSE, "none")})
    curves: dict[str, list[Point]] = {}
    for _, runs in labels.groupby(list(labels), sort=False, dropna=False):
        setting = {str(n): str(v) for n, v in runs.iloc[0].dropna().items()}
        own = leaks[leaks[RUN].isin(runs.index)]
        means = own.groupby("attack", sort=False)["leak"].mean()
        by_attack = {str(attack): float(leak) for attack, leak in means.items()}
        point = _point(setting, found.loc[runs.index], by_attack)
        curves.setdefault(point.labels.pop(DEFENSE), []).append(point)
    return curves


def _point(
    labels: dict[str, str], found: pd.DataFrame, leaks: dict[str, float]
) -> Point:
    first, utility = found.iloc[0], float(found["value"].mean())
    x, y = privacy(leaks, first["regression"]), usefulness(first["metric"], utility)
    return Point(labels, utility, leaks, x, y, len(found))


def tradeoff(study: Study) -> dict[str, Any]:
    """Return the curves of a study as they stand in ``study.json``."""
    curves: dict[str, dict[str, Any]] = {}
    for defense, points in points_of(study).items():
        places = [(point.x, point.y) for point in points]
        curves[defense] = {
            "area": area(places),
            "curve": staircase(places),
            "points": [asdict(point) for point in points],
        }
    ranked = sorted(curves.items(), key=lambda item: -item[1]["area"])
    return {"metric": main_metric(study.records()), "curves": dict(ranked)}
