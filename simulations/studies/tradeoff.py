"""Privacy against utility, and the area under that curve: one number per defense.

Privacy is 1 − 2·(a − 0.5) with a the leak AUC of the attack that finds most, from 0 (an
attack tells all labels) to 1 (no attack does better than a coin). For a regression it
is 1 − |ρ|. Utility is 2·(AUC − 0.5), the accuracy, or ρ, at least 0. Both are means
over seeds; the leaks are, before the largest is taken.

The curve says how much utility one can have at a given privacy or more: a staircase
that falls from left to right, through the points that no other one beats in both. The
area under it, for privacy from 0 to 1, is 1 for full utility at full privacy, and 0
where every point leaks all or is useless. It needs no further points: those of a model
that leaks everything, or that guesses, would not change it. It is the dominated
hypervolume of the points, with (0, 0) as the reference. More settings can only add to
it, so compare defenses for which equally many were tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .run_metrics import Document, is_regression, utility_of, worst_leaks
from .study import Study

SEED, DEFENSE = "seed", "defense"


@dataclass(frozen=True)
class Point:
    """What one setting gives, over all seeds."""

    labels: Mapping[str, str]
    utility: float
    leaks: Mapping[str, float]
    x: float
    y: float
    seeds: int


def privacy(leaks: Mapping[str, float], regression: bool = False) -> float:
    """Return how little the attack that finds most does find, from 0 to 1."""
    worst = max(leaks.values())
    return _unit(1.0 - worst if regression else 2.0 * (1.0 - worst))


def usefulness(metric: str, value: float) -> float:
    """Return a utility from 0, for what guessing reaches, to 1."""
    return _unit(2.0 * (value - 0.5) if metric.endswith("auc") else value)


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
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Document]] = {}
    for trial in study.trials:
        document = study.documents.get(trial["key"])
        if document is None or not _shown(document):
            continue
        labels = {n: v for n, v in trial["labels"].items() if n != SEED}
        defense = labels.pop(DEFENSE, "none")
        groups.setdefault((defense, tuple(labels.items())), []).append(document)
    curves: dict[str, list[Point]] = {}
    for (defense, setting), documents in groups.items():
        curves.setdefault(defense, []).append(_point(dict(setting), documents))
    return curves


def _shown(document: Document) -> bool:
    return math.isfinite(utility_of(document)[1]) and bool(worst_leaks(document))


def _point(labels: Mapping[str, str], documents: Sequence[Document]) -> Point:
    metric = utility_of(documents[0])[0]
    utility = statistics.mean(utility_of(document)[1] for document in documents)
    found: dict[str, list[float]] = {}
    for document in documents:
        for attack, leak in worst_leaks(document).items():
            found.setdefault(attack, []).append(leak)
    leaks = {attack: statistics.mean(values) for attack, values in found.items()}
    x = privacy(leaks, is_regression(documents[0]))
    y = usefulness(metric, utility)
    return Point(labels, utility, leaks, x, y, len(documents))


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
    documents = list(study.documents.values())
    metric = utility_of(documents[0])[0] if documents else ""
    return {"metric": metric, "curves": dict(ranked)}
