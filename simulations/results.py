"""The result of a run: a JSON document, and what it measured as a table of records."""

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from flower_vfl.errors import ConfigError
from flower_vfl.strategies import VerticalResult

from .config import RunConfig

FORMAT = 2
RESULT_FILE = "result.json"
PARTIES_FOLDER = "parties"
PRIVACY = "label_privacy"
LOSSES = "label_losses"  # of private labels, by what they reach on validation rows
RUN = "run"  # column that tells the runs of a study apart
COLUMNS = ["metric", "party", "attack", "layer", "split", "epoch", "step", "value"]
GUESS, ALONE = "guess", "alone"  # what no passive party is needed for
COMPLETION, LABELS_ONLY = "completion", "completion_labels_only"
_TYPES = dict.fromkeys(COLUMNS[:5], "str") | dict.fromkeys(("epoch", "step"), "int64")
_TYPES |= {"value": "float64"}

T = TypeVar("T")
Document = dict[str, Any]


def result_document(
    config: RunConfig,
    engine: str,
    result: VerticalResult,
    seconds: float,
    train_metrics: Mapping[str, float] = {},
) -> Document:
    """Return the result of a run; `train_metrics` are those of the training rows."""
    records = _records(result, train_metrics)
    epochs = records.query("split == 'train' and step == 0")
    spent = epochs.groupby("metric")["value"].sum()
    steps = spent.get("steps", 0.0) or 1.0
    last = final_metrics(records.assign(**{RUN: ""}))
    return {
        "format": FORMAT,
        "engine": engine,
        "config": asdict(config),
        "versions": dict(_versions()),
        "stopped": result.stopped,
        PRIVACY: result.label_privacy,
        LOSSES: result.label_losses,
        "seconds": {
            "total": seconds,
            "training": spent.get("seconds", 0.0),
            "step": spent.get("seconds", 0.0) / steps,
            "defense": spent.get("defense_seconds", 0.0) / steps,  # of a step
        },
        "bytes": {
            "training": int(spent.get("bytes", 0)),
            "step": spent.get("bytes", 0.0) / steps,
        },
        "records": records.to_dict("list"),
        "final": dict(zip(last["name"], last["value"], strict=True)),
    }


@cache
def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("flower-vfl", "flwr", "torch")}
    return {"python": platform.python_version(), **packages}


def _records(
    result: VerticalResult, train_metrics: Mapping[str, float]
) -> pd.DataFrame:
    """Return what training measured by epoch and by step, and every evaluation."""
    train = result.train_metrics_clientapp
    epochs, ends = list(train), np.cumsum([m["steps"] for m in train.values()])
    means = {each.name for each in result.records}  # of an epoch: not needed
    rows: list[tuple[Any, ...]] = [
        (name, "train", epoch, 0, value)
        for epoch, metrics in train.items()
        for name, value in metrics.items()
        if name not in means
    ]
    evaluated = [
        (split, epoch, metrics)
        for epoch, splits in result.evaluations.items()
        for split, metrics in splits.items()
    ]
    if train_metrics:
        evaluated.append(("train", epochs[-1], dict(train_metrics)))
    for split, epoch, metrics in evaluated:
        step = ends[epochs.index(epoch)]
        rows += [(name, split, epoch, step, value) for name, value in metrics.items()]
    steps = result.table()
    places = np.searchsorted(ends, steps["step"].astype(int))
    steps = steps.assign(split="train", epoch=[epochs[place] for place in places])
    whole = pd.DataFrame(rows, columns=["metric", "split", *COLUMNS[5:]])
    whole = whole.assign(party="", attack="", layer="")
    return pd.concat([whole, steps], ignore_index=True)[COLUMNS].astype(_TYPES)


def table(document: Mapping[str, Any]) -> pd.DataFrame:
    """Return everything that a run measured, one row for each number.

    A metric of an epoch has step 0, an evaluation the step after which it was made.
    Rows without step and epoch are about the whole run: its cost and model completion.
    """
    try:
        records, whole = document["records"], list(_whole_run(document))
        columns = {
            name: [*records[name], *(row[place] for row in whole)]
            for place, name in enumerate(COLUMNS)
        }
        return pd.DataFrame(columns).astype(_TYPES)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = "the records of a result are not what flower-vfl writes"
        raise ConfigError(f"{text}: {error!r}") from error


def _whole_run(document: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what is known about a run as a whole, in the order of COLUMNS."""
    for kind in ("seconds", "bytes", "memory"):
        for name, value in document.get(kind, {}).items():
            yield f"{kind}_{name}", "", "", "", "", 0, 0, value
    if GUESS in document:
        yield GUESS, "", "", "", "", 0, 0, document[GUESS]
    for name, value in document.get(ALONE, {}).items():
        yield name, "label", "", "", ALONE, 0, 0, value
    for entry in document.get(COMPLETION, []):
        for split in ("train", "test"):
            for metric, key in ((COMPLETION, ""), (LABELS_ONLY, "labels_only_")):
                value = entry[f"{key}{split}"]
                if value is not None:
                    where = entry["party"], entry["attack"], "", split
                    yield metric, *where, 0, 0, value


def tables(documents: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return the tables of several runs as one; the column ``run`` has their keys."""
    found = {key: table(document) for key, document in documents.items()}
    found = found or {"": table({"records": {name: [] for name in COLUMNS}})}
    frame = pd.concat(found, names=[RUN])
    return frame.reset_index(RUN).reset_index(drop=True)


def kept_for_last(function: Callable[[pd.DataFrame], T]) -> Callable[[pd.DataFrame], T]:
    """Keep what a function returned for the records that it was given last."""
    last: tuple[pd.DataFrame, T] | None = None

    @wraps(function)
    def call(records: pd.DataFrame) -> T:
        nonlocal last
        if (known := last) is None or known[0] is not records:
            last = known = records, function(records)
        return known[1]

    return call


@kept_for_last
def final_metrics(records: pd.DataFrame) -> pd.DataFrame:
    """Return the last evaluation of each run; a name is ``test_auc``."""
    found = records.query("party == '' and attack == '' and step > 0")
    last = found.groupby([RUN, "split"])["epoch"].transform("max")
    found = found[found["epoch"] == last]
    found = found.assign(name=found["split"] + "_" + found["metric"])
    # An attack on an epoch records the model's own AUC on training rows, too.
    return found.drop_duplicates([RUN, "name"], keep="last")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def save_result(document: Document, folder: Path) -> None:
    """Write a result document, whole or not at all."""
    write_whole(folder / RESULT_FILE, f"{json.dumps(document)}\n".encode())


def load_result(folder: Path) -> Document:
    """Read a result document."""
    path = folder / RESULT_FILE
    if not path.is_file():
        remedy = "give the --out folder of a finished run"
        raise ConfigError(f"'{folder}' has no {RESULT_FILE}; {remedy}")
    document: Document = json.loads(path.read_text())
    check_format(document, path)
    return document


def read_json(path: Path) -> Document | None:
    """Return the content of a JSON file, or None if it is missing or not whole."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_format(document: Mapping[str, Any], path: Path) -> None:
    """Refuse a file that another version wrote."""
    if (given := document.get("format")) != FORMAT:
        remedy = f"this version reads {FORMAT}; run the command that made it again"
        raise ConfigError(f"'{path}' has format {given}, {remedy}")
