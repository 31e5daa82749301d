"""What can be said about the files of several parties that one process reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from sklearn.metrics import balanced_accuracy_score
from sklearn.tree import DecisionTreeClassifier

from flower_vfl.alignment.ids import encode_ids, spelled_alike
from flower_vfl.errors import ConfigError

from .party_files import PartyFile, TaskLabels

_SAMPLE = 2000  # rows that are looked at
_PERFECT = 0.95  # balanced accuracy, or rank correlation


def summary(path: str, rows: PartyFile) -> Iterator[str]:
    """Yield what a file was read as, and what is noteworthy about its columns."""
    name = Path(path).name
    kinds = Counter(c.kind for c in rows.columns if c.kind not in ("id", "label"))
    told = [f"label '{c.name}' ({c.note})" for c in rows.columns if c.kind == "label"]
    told += [f"{count} {kind}" for kind, count in kinds.items()]
    yield f"{name}: {len(rows.ids)} rows: {', '.join(told)}; {written_as(rows)}"
    for column in rows.columns:
        if column.note and column.kind != "label":
            yield f"{name}: column '{column.name}': {column.note}"


def written_as(rows: PartyFile) -> str:
    """Return how a file is written."""
    signs = ("delimiter", "decimal", "quoted_line_breaks")
    told = [
        f"{k} {v!r}" if k in signs else str(v) for k, v in rows.written.items() if v
    ]
    return ", ".join(told).replace("_", " ")


def label_warnings(
    files: Mapping[str, PartyFile], found: TaskLabels, normalise: str = ""
) -> Iterator[str]:
    """Yield each column that alone predicts the labels, which the first file holds."""
    known = pd.Series(dtype=found.labels.dtype)
    for path, rows in files.items():
        keys = encode_ids(map(str, rows.ids), normalise or None)
        known = pd.Series(found.labels, keys) if known.empty else known
        table = rows.features.set_axis(keys)
        table = table[table.index.isin(known.index)]
        for name in predictive_columns(table, known[table.index], len(found.classes)):
            yield (
                f"warning: column '{name}' of '{Path(path).name}' alone predicts the "
                "label almost perfectly; if it follows from the label, leave it out "
                f"with --drop '{name}'"
            )


def predictive_columns(
    features: pd.DataFrame, labels: pd.Series[Any], classes: int
) -> list[str]:
    """Return the columns each of which predicts the labels almost perfectly."""
    leaves = 2 * max(classes, 2)
    labels = labels.sample(min(len(labels), _SAMPLE), random_state=0)
    if len(labels) < 10 * leaves:  # any column would do
        return []
    ranks = features.loc[labels.index].rank(method="dense").fillna(0)

    def score(column: pd.Series[Any]) -> float:
        if not classes:
            return abs(column.corr(labels, method="spearman"))
        tree = DecisionTreeClassifier(max_leaf_nodes=leaves, class_weight="balanced")
        guesses = tree.fit(column.to_frame(), labels).predict(column.to_frame())
        return float(balanced_accuracy_score(labels, guesses))

    varied = [str(name) for name in ranks if ranks[name].nunique() > 1]
    return [name for name in varied if score(ranks[name]) >= _PERFECT]


def check_spelling(ids: Mapping[str, Iterable[Any]]) -> None:
    """Refuse ids that are the same as those of the first file but for the spelling."""
    (first, own), *others = ids.items()
    for path, theirs in others:
        if found := spelled_alike(set(map(str, own)), set(map(str, theirs))):
            raise ConfigError(
                f"the ids look alike but are written differently: '{found[1]}' in "
                f"'{first}', '{found[2]}' in '{path}'; use --normalise {found[0]}, or "
                "--normalise none if they are different ids"
            )
