"""Records of a run, grouped by name as tests like to read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flower_vfl.leakage.monitor import LIMIT
from flower_vfl.records import Measurement
from flower_vfl.strategies import VerticalResult


def series_of(result: VerticalResult) -> dict[str, dict[str, list[Any]]]:
    """Return the steps and the values of everything that was measured, by name.

    An exceeded limit is listed without the attack that exceeded it.
    """
    series: dict[str, dict[str, list[Any]]] = {}
    for each in result.records:
        found = series.setdefault(_name(each), {"steps": [], "values": []})
        found["steps"].append(each.step)
        found["values"].append(each.value)
    return series


def by_name(measured: Iterable[Measurement]) -> dict[str, float]:
    """Return the values of one step by name, as :func:`series_of` names them."""
    return {_name(each): each.value for each in measured}


def _name(each: Measurement) -> str:
    return f"{LIMIT}/{each.party}" if each.metric == LIMIT else each.name
