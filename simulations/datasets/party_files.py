"""A party's file: ids, features and, at the label party, labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task

MAX_CLASSES = 20
_SUFFIXES = (".csv", ".csv.gz", ".parquet")


class PartyFile(NamedTuple):
    """The rows of one party's file, in the order of the file."""

    ids: NDArray[Any]
    features: pd.DataFrame
    labels: NDArray[Any] | None


class TaskLabels(NamedTuple):
    """Labels encoded for training: classes from 0, or values without classes."""

    task: Task
    classes: tuple[str, ...]
    labels: NDArray[Any]


def read_party_file(
    path: Path | str,
    id_column: str,
    label_column: str | None = None,
    drop: Sequence[str] = (),
) -> PartyFile:
    """Read a party's CSV or Parquet file.

    Parameters
    ----------
    path : Path | str
        A ``.csv``, ``.csv.gz`` or ``.parquet`` file with one row for each id.
    id_column : str
        Column of the row ids that the parties share.
    label_column : str | None (default: None)
        Column of the labels; None at a passive party.
    drop : Sequence[str] (default: ())
        Columns that are not features.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "shop.csv"
    ...     pd.DataFrame({"id": [7, 3], "spent": [1.5, 2.5]}).to_csv(file)
    ...     read_party_file(file, "id").ids
    array([7, 3])
    """
    path = Path(path)
    frame = _read(path, id_column)
    wanted = [id_column, *([] if label_column is None else [label_column]), *drop]
    for column in wanted:
        if column not in frame.columns:
            raise ConfigError(
                f"'{path}' has no column '{column}'; its columns: "
                f"{', '.join(map(str, frame.columns))}"
            )
    if frame.empty:
        raise ConfigError(f"'{path}' has no rows; export it again with its data")
    ids = _read_ids(path, frame[id_column])
    labels = None
    if label_column is not None:
        missing = int(frame[label_column].isna().sum())
        if missing:
            raise ConfigError(
                f"'{path}' has {missing} rows without a label in '{label_column}'; "
                "remove these rows or fill the labels in"
            )
        labels = frame[label_column].to_numpy(copy=True)
    features = frame.drop(columns=list(dict.fromkeys(wanted)))
    if features.shape[1] == 0 and label_column is None:
        raise ConfigError(
            f"'{path}' has no feature column left beside '{id_column}'"
            + (f" and the dropped {list(drop)}" if drop else "")
            + "; a passive party needs at least one"
        )
    return PartyFile(ids, features, labels)


def _read(path: Path, id_column: str) -> pd.DataFrame:
    """Read a file; the ids of a CSV file stay as they are written."""
    if not path.name.lower().endswith(_SUFFIXES):
        raise ConfigError(
            f"'{path}' has an unknown format; save it as {', '.join(_SUFFIXES)}"
        )
    if not path.is_file():
        raise ConfigError(f"there is no file '{path}'; check the path")
    try:
        if path.name.lower().endswith(".parquet"):
            frame = pd.read_parquet(path)
            return frame.reset_index() if frame.index.name == id_column else frame
        return _read_csv(path, id_column)
    except ImportError as error:
        raise ConfigError(
            f"reading '{path}' needs pyarrow: pip install 'flower-vfl[parquet]'"
        ) from error
    except pd.errors.EmptyDataError as error:
        raise ConfigError(f"'{path}' is empty; export it again") from error
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"'{path}' cannot be read ({error}); check it") from error


def _read_csv(path: Path, id_column: str) -> pd.DataFrame:
    frame = pd.read_csv(path, index_col=False, low_memory=False)
    if id_column in frame.columns:
        # Read again as text, or "007" would become 7 and "NA" a missing value.
        ids = pd.read_csv(
            path, index_col=False, usecols=[id_column], dtype=str, na_filter=False
        )
        frame[id_column] = ids[id_column]
    return frame


def _read_ids(path: Path, column: pd.Series[Any]) -> NDArray[Any]:
    """Return the ids; refuse missing and repeated ones."""
    missing = int((column.isna() | (column.astype(str).str.strip() == "")).sum())
    if missing:
        raise ConfigError(
            f"'{path}' has {missing} rows without an id in '{column.name}'; remove "
            "these rows"
        )
    if pd.api.types.is_float_dtype(column.dtype) and (column % 1 == 0).all():
        column = column.astype(np.int64)
    text = column.astype(str).str.strip()
    repeated = text[text.duplicated()]
    if len(repeated):
        raise ConfigError(
            f"'{path}' has {len(repeated)} rows that repeat an id of '{column.name}', "
            f"the first of them '{repeated.iloc[0]}'; keep one row for each id"
        )
    # Up to 18 digits always fit into int64.
    if text.str.fullmatch(r"0|-?[1-9][0-9]{0,17}").all():
        return text.astype(np.int64).to_numpy(copy=True)
    return text.to_numpy(dtype=str)


def order_by_ids(rows: PartyFile) -> PartyFile:
    """Return the rows sorted by id, so that parties with equal ids agree on the order.

    Numbers are sorted by value, text by code point.

    Parameters
    ----------
    rows : PartyFile
        What :func:`read_party_file` returned.

    Examples
    --------
    >>> rows = PartyFile(np.array([7, 3]), pd.DataFrame({"age": [40, 20]}), None)
    >>> order_by_ids(rows).features["age"].tolist()
    [20, 40]
    """
    order = np.argsort(rows.ids, kind="stable")
    return PartyFile(
        rows.ids[order],
        rows.features.iloc[order].reset_index(drop=True),
        None if rows.labels is None else rows.labels[order],
    )


def infer_task(labels: ArrayLike, task: Task | None = None) -> TaskLabels:
    """Infer the task from labels, and encode them for it.

    Two different values make a binary task. Text, booleans and up to 20 different
    whole numbers make a multiclass task. Other numbers make a regression. Classes are
    numbered in sorted order.

    Parameters
    ----------
    labels : ArrayLike
        One label for each row.
    task : Task | None (default: None)
        The task, if it should not be inferred.

    Examples
    --------
    >>> infer_task(["b", "c", "a"])
    TaskLabels(task='multiclass', classes=('a', 'b', 'c'), labels=array([1, 2, 0]))
    """
    if task not in (None, "binary", "multiclass", "regression"):
        raise ConfigError(
            f"unknown task '{task}'; known: binary, multiclass, regression"
        )
    series = pd.Series(np.asarray(labels)).infer_objects()
    if series.isna().any():
        raise ConfigError(f"{int(series.isna().sum())} labels are missing")
    numeric = pd.api.types.is_numeric_dtype(series.dtype)
    numeric = numeric and not pd.api.types.is_bool_dtype(series.dtype)
    whole = numeric and bool((series % 1 == 0).all())
    if whole:
        series = series.astype(np.int64)  # so that a class is called 1 and not 1.0
    if not numeric:
        series = series.astype(str)
    values, encoded = np.unique(series.to_numpy(), return_inverse=True)
    if len(values) < 2:
        raise ConfigError(f"every label is '{values[0] if len(values) else ''}'")
    if task is None:
        few = not numeric or (whole and len(values) <= MAX_CLASSES)
        task = "multiclass" if few else "regression"
        task = "binary" if len(values) == 2 else task
    if task == "regression":
        if not numeric:
            raise ConfigError(f"a regression needs numbers, got labels '{values[0]}'")
        return TaskLabels(task, (), series.to_numpy(np.float32, copy=True))
    if task == "binary" and len(values) != 2:
        raise ConfigError(f"a binary task has two labels, found {len(values)}")
    classes = tuple(str(value) for value in values)
    return TaskLabels(task, classes, encoded.astype(np.int64))
