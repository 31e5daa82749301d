"""The result of a run as a JSON document."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flower_vfl.errors import ConfigError
from flower_vfl.strategies import VerticalResult

from .config import RunConfig

FORMAT = 1
RESULT_FILE = "result.json"
PARTIES_FOLDER = "parties"


def result_document(
    config: RunConfig, engine: str, result: VerticalResult, seconds: float
) -> dict[str, Any]:
    """Return everything worth keeping about a run."""
    train = result.train_metrics_clientapp
    evaluated = result.evaluate_metrics_clientapp
    epochs: list[dict[str, Any]] = [
        {"epoch": epoch, **dict(train[epoch]), **dict(evaluated.get(epoch, {}))}
        for epoch in train
    ]
    training: float = sum(metrics["seconds"] for metrics in epochs)
    defense: float = sum(metrics.get("defense_seconds", 0.0) for metrics in epochs)
    steps: int = sum(metrics["steps"] for metrics in epochs)
    # checkpoints of an older version have no bytes
    traffic: int = sum(metrics.get("bytes", 0) for metrics in epochs)
    last = max(evaluated, default=None)
    return {
        "format": FORMAT,
        "engine": engine,
        "config": asdict(config),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("flower-vfl", "flwr", "torch")},
        },
        "epochs": epochs,
        "series": _series(result),
        "leakage": result.leakage(),
        "membership": result.membership(),
        "stopped": result.stopped,
        "final": {} if last is None else dict(evaluated[last]),
        "seconds": {
            "total": seconds,
            "training": training,
            "step": training / steps if steps else 0.0,
            "defense": defense / steps if steps else 0.0,  # of a step
        },
        "bytes": {"training": traffic, "step": traffic / steps if steps else 0.0},
    }


def _series(result: VerticalResult) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = {}
    for each in result.records:
        entry = found.setdefault(each.name, {"steps": [], "values": []})
        entry["steps"].append(each.step)
        entry["values"].append(each.value)
    return found


def save_result(document: dict[str, Any], folder: Path) -> None:
    """Write a result document, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{RESULT_FILE}.{os.getpid()}"
    part.write_text(json.dumps(document, indent=2) + "\n")
    part.replace(folder / RESULT_FILE)


def load_result(folder: Path) -> dict[str, Any]:
    """Read a result document."""
    path = folder / RESULT_FILE
    if not path.is_file():
        raise ConfigError(
            f"'{folder}' has no {RESULT_FILE}; give the --out folder of a finished run"
        )
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise ConfigError(
            f"'{path}' is of format {document.get('format')}, this version reads "
            f"{FORMAT}; use the version that wrote it"
        )
    return document
