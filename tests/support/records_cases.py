"""Records of a run, grouped by name as tests like to read them."""

from __future__ import annotations

from typing import Any

from flower_vfl.strategies import VerticalResult


def series_of(result: VerticalResult) -> dict[str, dict[str, list[Any]]]:
    """Return the steps and the values of everything that was measured, by name."""
    series: dict[str, dict[str, list[Any]]] = {}
    for each in result.records:
        found = series.setdefault(each.name, {"steps": [], "values": []})
        found["steps"].append(each.step)
        found["values"].append(each.value)
    return series
