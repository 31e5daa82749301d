"""Results of runs that never were, for the tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import COLUMNS, FORMAT

_EMPTY = ("", "", "", "", "train", 1, 1, 0.0)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return records as columns; a field that is not given has its usual value."""
    whole = [dict(zip(COLUMNS, _EMPTY, strict=True)) | dict(row) for row in rows]
    return {name: [row[name] for row in whole] for name in COLUMNS}


def leak_rows(
    leaks: Mapping[str, float], party: str = "passive-1", random: bool = False
) -> list[dict[str, Any]]:
    """Return the records of attacks on one party, the same in each batch."""
    end = "_random" if random else ""
    return [
        {"metric": f"{metric}{end}", "party": party, "attack": attack, "value": value}
        for attack, leak in leaks.items()
        for metric, value in (("leak", leak), ("leak_flipped", max(leak, 1 - leak)))
    ]


def evaluation_rows(split: str = "test", **metrics: float) -> list[dict[str, Any]]:
    """Return the records of an evaluation."""
    return [{"metric": m, "split": split, "value": v} for m, v in metrics.items()]


def document_of(
    config: RunConfig,
    auc: float = 0.9,
    leaks: Mapping[str, float] | None = None,
    step: float = 0.1,
) -> dict[str, Any]:
    """Return a result as a run would, without a run."""
    rows = evaluation_rows(accuracy=0.7, auc=auc)
    return {
        "format": FORMAT,
        "engine": "in-process",
        "config": asdict(config),
        "versions": {"torch": "2.0+cpu"},
        "records": columns_of(rows + leak_rows(leaks or {"norm": 0.8})),
        "stopped": "",
        "final": {"test_accuracy": 0.7, "test_auc": auc},
        "seconds": {"total": 3.0, "training": 2.0, "step": step},
    }
