"""Results of runs that never were, for the tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flower_vfl.simulations.config import RunConfig


def document_of(
    config: RunConfig,
    auc: float = 0.9,
    leaks: Mapping[str, float] | None = None,
    step: float = 0.1,
) -> dict[str, Any]:
    """Return a result as a run would, without a run."""
    found = {
        attack: {"mean": leak, "flipped_mean": max(leak, 1 - leak), "batches": 4}
        for attack, leak in (leaks or {"norm": 0.8}).items()
    }
    return {
        "format": 1,
        "engine": "in-process",
        "config": asdict(config),
        "versions": {"torch": "2.0+cpu"},
        "epochs": [],
        "series": {},
        "leakage": {"passive-1": found},
        "stopped": "",
        "final": {"test_accuracy": 0.7, "test_auc": auc},
        "seconds": {"total": 3.0, "training": 2.0, "step": step},
    }
