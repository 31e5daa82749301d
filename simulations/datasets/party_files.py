"""A party's file: ids, features and labels; and what several files say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from flower_vfl.alignment.ids import encode_ids, spelled_alike
from flower_vfl.errors import ConfigError, TableError, check_name
from flower_vfl.objectives import Task

from .reading import Column, check_feature, read_cells, take_columns

MAX_CLASSES = 10


class PartyFile(NamedTuple):
    """The rows of one party's file, in the order of the file."""

    ids: NDArray[Any]
    features: pd.DataFrame
    labels: NDArray[Any] | None
    columns: tuple[Column, ...] = ()  # what each was taken for
    written: Mapping[str, Any] = {}


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
    missing: Sequence[str] = (),
    task: Task | None = None,
    check: Literal["all", "id", "none"] = "all",
) -> PartyFile:
    r"""Read a party's CSV or Parquet file.

    The encoding, the delimiter and the decimal sign of a CSV file are recognised. A
    column that cannot be used as it is raises an error.

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
    missing : Sequence[str] (default: ())
        Texts that stand for a missing value, beside those of pandas.
    task : Task | None (default: None)
        Task of the labels, if it should not be inferred.
    check : "all" | "id" | "none" (default: "all")
        Which columns must be usable; the problems of others are only noted.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "shop.csv"
    ...     _ = file.write_text("id;spent\n7;1,5\n3;2,5")
    ...     rows = read_party_file(file, "id")
    >>> rows.ids, rows.features["spent"].tolist(), rows.written["delimiter"]
    (array([7, 3]), [1.5, 2.5], ';')
    """
    path = Path(path)
    frame, written = read_cells(path, id_column)
    for column in filter(None, (id_column, label_column)):
        if column not in frame:
            known = ", ".join(frame.columns)
            raise TableError(f"'{path}' has no column '{column}'; its columns: {known}")
    if "" in frame:
        remedy = "name it, or save the file without its index"
        raise TableError(f"'{path}' has a column without a name; {remedy}")
    if len(twice := frame.columns[frame.columns.duplicated()]):
        raise TableError(f"'{path}' has two columns called '{twice[0]}'; rename one")
    if label_column == id_column:
        raise TableError(f"'{id_column}' of '{path}' cannot be both id and label")
    if frame.empty:
        raise TableError(f"'{path}' has no rows; export it again with its data")
    columns, labels = [Column(id_column, "id")], None
    ids = _read_ids(frame.pop(id_column), columns[0])
    unused = [name for name in drop if name in frame and name != label_column]
    frame, found = take_columns(frame.drop(columns=unused), written, missing)
    first: dict[bytes, str] = {}
    for about in found:
        try:
            if about.name == label_column:
                labels, about.kind = frame.pop(about.name).to_numpy(copy=True), "label"
                about.note = infer_task(labels, task).task
            elif not about.problem:
                check_feature(frame[about.name], about)
                digests = pd.util.hash_pandas_object(frame[about.name], index=False)
                same = first.setdefault(digests.to_numpy().tobytes(), about.name)
                if same != about.name:
                    about.note = f"the same values as '{same}'"
        except ConfigError as error:
            about.problem = about.problem or str(error)
    columns += [*found, *(Column(name, "left out") for name in unused)]
    wrong = [c for c in columns if c.problem and (check == "all" or c.kind == check)]
    if wrong:
        more = f" ({len(wrong)} such columns: flower-vfl inspect)" if wrong[1:] else ""
        problem = f"'{wrong[0].name}': {wrong[0].problem}{more}"
        raise TableError(f"'{path}', column {problem}")
    if check == "all" and frame.shape[1] == 0 and label_column is None:
        used = f"'{id_column}'" + (f" and the dropped {list(drop)}" if drop else "")
        text = f"'{path}' has no feature column left besides {used}"
        raise TableError(f"{text}; a passive party needs at least one")
    return PartyFile(ids, frame, labels, tuple(columns), written)


def _read_ids(column: pd.Series[Any], about: Column) -> NDArray[Any]:
    """Return the ids; missing and repeated ones are a problem."""
    missing = int((column.isna() | (column.astype(str).str.strip() == "")).sum())
    if not missing and pd.api.types.is_float_dtype(column) and (column % 1 == 0).all():
        column = column.astype(np.int64)
    text = column.astype(str).str.strip()
    repeated = text[text.duplicated()]
    about.different, about.missing = text.nunique(), missing
    if missing:
        about.problem = f"{missing} rows without an id; remove these rows"
    elif len(repeated):
        first = f"the first of them '{repeated.iloc[0]}'; keep one row for each id"
        about.problem = f"{len(repeated)} rows that repeat an id, {first}"
    # Up to 18 digits always fit into int64.
    elif text.str.fullmatch(r"0|-?[1-9][0-9]{0,17}").all():
        return text.astype(np.int64).to_numpy(copy=True)
    odd = text[text.str.fullmatch(r"0+[0-9]+|[0-9]+\.0*")]
    if 0 < len(odd) < len(text) and text.str.len().nunique() > 1:
        about.note = f"written in different ways, such as '{odd.iloc[0]}'"
    return text.to_numpy(dtype=str)


def order_by_ids(rows: PartyFile) -> PartyFile:
    """Return the rows sorted by id: numbers by value, text by code point."""
    order = np.argsort(rows.ids, kind="stable")
    labels = None if rows.labels is None else rows.labels[order]
    features = rows.features.iloc[order].reset_index(drop=True)
    return PartyFile(rows.ids[order], features, labels)


def infer_task(labels: ArrayLike, task: Task | None = None) -> TaskLabels:
    """Infer the task from labels, and encode them for it.

    Two different values make a binary task. Text, booleans and up to 10 different
    whole numbers make a multiclass task, numbers that are not whole a regression. More
    whole numbers could be either, so that the task must be given; so must that of text
    with fewer than three rows for each of more than 10 classes. Classes are numbered in
    sorted order.

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
    if task is not None:
        check_name("task", task, ("binary", "multiclass", "regression"))
    series = pd.Series(np.asarray(labels)).infer_objects()
    if missing := int(series.isna().sum()):
        remedy = "remove them or fill them in"
        raise ConfigError(f"{missing} rows without a label; {remedy}")
    numeric = pd.api.types.is_numeric_dtype(series.dtype)
    numeric = numeric and not pd.api.types.is_bool_dtype(series.dtype)
    if numeric and np.isinf(series.to_numpy(np.float64)).any():
        raise ConfigError("some labels are infinite; correct them")
    whole = numeric and bool((series % 1 == 0).all())
    if whole:
        series = series.astype(np.int64)  # so that a class is called 1 and not 1.0
    if not numeric:
        series = series.astype(str)
    values, encoded = np.unique(series.to_numpy(), return_inverse=True)
    if len(values) < 2:
        only = values[0] if len(values) else ""
        raise ConfigError(f"every label is '{only}'; training needs two or more")
    if task is None:
        rare = not numeric and len(values) * 3 > len(series)
        if len(values) > MAX_CLASSES and (whole or rare):
            text = f"{len(series)} labels have {len(values)} different values"
            remedy = "add --task multiclass for classes, --task regression for amounts"
            raise ConfigError(f"{text}: {remedy}")
        task = "multiclass" if whole or not numeric else "regression"
        task = "binary" if len(values) == 2 else task
    if task == "regression":
        if not numeric:
            raise ConfigError(f"a regression needs numbers, got labels '{values[0]}'")
        return TaskLabels(task, (), series.to_numpy(np.float32, copy=True))
    if task == "binary" and len(values) != 2:
        raise ConfigError(f"a binary task has two labels, found {len(values)}")
    classes = tuple(str(value) for value in values)
    return TaskLabels(task, classes, encoded.astype(np.int64))


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
    signs, known = ("delimiter", "decimal", "quoted_line_breaks"), rows.written
    told = [f"{k} {v!r}" if k in signs else str(v) for k, v in known.items() if v]
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
            text = f"column '{name}' of '{Path(path).name}' alone predicts the label"
            remedy = f"if it follows from the label, leave it out with --drop '{name}'"
            yield f"warning: {text} almost perfectly; {remedy}"


def predictive_columns(
    features: pd.DataFrame, labels: pd.Series[Any], classes: int
) -> list[str]:
    """Return the columns each of which predicts the labels almost perfectly."""
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.tree import DecisionTreeClassifier

    leaves = 2 * max(classes, 2)
    labels = labels.sample(min(len(labels), _SAMPLE), random_state=0)
    if len(labels) < 10 * leaves:  # any column would do
        return []
    ranks = features.loc[labels.index].rank(method="dense").fillna(0)
    truth = labels.to_numpy()

    def score(column: pd.Series[Any]) -> float:
        if not classes:
            return abs(column.corr(labels, method="spearman"))
        tree = DecisionTreeClassifier(max_leaf_nodes=leaves, class_weight="balanced")
        values = column.to_numpy()[:, None]
        guesses = tree.fit(values, truth).predict(values)
        return float(balanced_accuracy_score(truth, guesses))

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
