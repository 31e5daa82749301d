"""The datasets by name, and the readers of their files."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.objectives import Task

from . import files
from .types import Dataset, Pictures


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from."""

    read: Callable[[str, Any, str | None], Dataset]  # from name, file and target
    file: files.DataFile | None = None
    targets: tuple[str, ...] = ()


def read_table(
    name: str,
    path: Path | None,
    target: str | None,
    *,
    label: str,
    task: Task = "binary",
    classes: tuple[str, ...] = ("no", "yes"),
    ids: str | None = None,
    test: str | int | None = None,
    categorical: tuple[str, ...] = (),
    log_columns: tuple[str, ...] = (),
    bundled: Mapping[str, Any] | None = None,
) -> Dataset:
    """Return a table from a CSV file, or from scikit-learn if there is no file.

    `test` is a column that marks test rows, or the random state of scikit-learn's
    ``train_test_split`` with a fifth of the rows for testing.
    """
    if path is not None:
        columns = [str(column) for column in pd.read_csv(path, nrows=0).columns]
        codes = set(columns if categorical == ("*",) else categorical) - {label, test}
        frame = pd.read_csv(path, dtype=dict.fromkeys(codes, str))
    else:
        assert bundled is not None  # otherwise the file was required
        frame = load_bundled(**bundled)
    if isinstance(test, int):
        from sklearn.model_selection import train_test_split

        _, held_out = train_test_split(frame.index, test_size=0.2, random_state=test)
        frame, test = frame.assign(is_test=frame.index.isin(held_out)), "is_test"
    regression = task == "regression"
    numbers = np.arange(len(frame))
    if ids is not None:
        whole = pd.api.types.is_integer_dtype(frame[ids].dtype)
        numbers = frame[ids].to_numpy(np.int64 if whole else str).copy()
    return Dataset(
        name=name,
        task=task,
        classes=() if regression else classes,
        labels=frame[label].to_numpy(np.float32 if regression else np.int64).copy(),
        ids=numbers,
        table=frame.drop(columns=list(filter(None, (label, ids, test)))),
        test_mask=None if test is None else frame[test].to_numpy() == 1,
        log_columns=log_columns,
    )


def read_text(
    name: str,
    path: Path,
    target: str | None,
    *,
    text: str,
    label: str,
    classes: tuple[str, ...],
    first: int = 0,
) -> Dataset:
    """Return a table with one text column; `first` is the number of the first class."""
    frame = pd.read_csv(path, keep_default_na=False)
    labels, test = frame[label].to_numpy() - first, frame["is_test"].to_numpy() == 1
    texts = tuple(frame[text].tolist())
    return _classified(name, classes, labels, text=texts, test_mask=test)


def read_imdb(name: str, path: Path, target: str | None) -> Dataset:
    """Return IMDB reviews as one 0/1 column for each of the 500 commonest words."""
    with np.load(path) as stored:
        words = [str(word) for word in stored["vocab"]]
        bits = np.unpackbits(stored["bits"], axis=1, count=len(words))
        parts = {"table": pd.DataFrame(bits, columns=words), "columns_are_words": True}
        test, classes = stored["is_test"] == 1, ("negative", "positive")
        return _classified(name, classes, stored["y"], test_mask=test, **parts)


def read_ham10000(name: str, path: Path, target: str | None) -> Dataset:
    """Return HAM10000's images of skin lesions, grouped by lesion.

    ``"rare-melanoma"`` is 5,840 images, 10 % melanoma, as in GAFM's part of SIIM-ISIC.
    """
    with np.load(path) as stored:
        diagnosis = target == "dx"
        classes = stored["dx_names"] if diagnosis else ("other", "melanoma")
        pictures = _jpegs(stored["blob"], stored["offset"], (3, 64, 64))
        labels, ids = stored["dx" if diagnosis else "y"], stored["image_id"]
        parts = {"pictures": pictures, "ids": ids.astype(np.int64)}
        groups = stored["lesion"].astype(np.int64)
        dataset = _classified(name, classes, labels, groups=groups, **parts)
    if target != "rare-melanoma":
        return dataset
    order = np.random.default_rng(0).permutation(len(labels))
    counts = ((0, 5256), (1, 584))
    chosen = [order[labels[order] == label][:count] for label, count in counts]
    return dataset.take(np.sort(np.concatenate(chosen)))


def read_bhi(name: str, path: Path, target: str | None) -> Dataset:
    """Return patches of breast tissue, grouped by patient."""
    with np.load(path) as stored:
        pictures = _jpegs(stored["blob"], stored["offset"], (3, 50, 50))
        groups, classes = stored["patient"].astype(np.int64), ("healthy", "carcinoma")
        return _classified(name, classes, stored["y"], pictures=pictures, groups=groups)


def read_cifar10(name: str, path: Path, target: str | None) -> Dataset:
    """Return a CIFAR-10 subset, training rows before test rows."""
    with np.load(path) as stored:
        labels = np.concatenate([stored["y_train"], stored["y_test"]])
        pixels = np.concatenate([stored["x_train"], stored["x_test"]])
        pictures = Pictures((3, 32, 32), pixels)
        test = np.arange(len(labels)) >= len(stored["y_train"])
        classes = stored["classes"]
        return _classified(name, classes, labels, pictures=pictures, test_mask=test)


def _classified(
    name: str, classes: Sequence[str], labels: NDArray[Any], **parts: Any
) -> Dataset:
    """Return a dataset with classes; ids are row numbers unless they are given."""
    return Dataset(
        name=name,
        task="binary" if len(classes) == 2 else "multiclass",
        classes=tuple(map(str, classes)),
        labels=labels.astype(np.int64),
        **{"ids": np.arange(len(labels)), **parts},
    )


def _jpegs(
    blob: NDArray[np.uint8], offset: NDArray[np.int64], shape: tuple[int, int, int]
) -> Pictures:
    files = [blob[start:stop].tobytes() for start, stop in pairwise(offset)]
    return Pictures(shape, np.array(files, dtype=object))


def load_bundled(name: str, **options: Any) -> pd.DataFrame:
    """Return a table of scikit-learn, which takes seconds to import."""
    from sklearn import datasets

    if name != "synthetic":
        load = getattr(datasets, f"load_{name}")
        return cast(pd.DataFrame, load(as_frame=True, **options).frame)
    # A column for each of 1,024 parties, of which 32 tell of the label.
    kinds = {"n_informative": 32, "n_redundant": 0}
    features, labels = datasets.make_classification(2000, 1024, random_state=0, **kinds)
    frame = pd.DataFrame(features.astype(np.float32)).add_prefix("f")
    return frame.assign(target=labels)


_FETCHED = {"spambase": files.SPAMBASE, "credit-default": files.CREDIT_DEFAULT}
_FETCHED |= {"boston": files.BOSTON, "boston-gafm": files.BOSTON, "adult": files.ADULT}
_READERS = {"imdb": read_imdb, "ham10000": read_ham10000, "bhi": read_bhi}
_READERS |= dict.fromkeys(("cifar10", "cifar10-20k"), read_cifar10)


def _source(name: str, entry: dict[str, Any]) -> Source:
    known = ((k, tuple(v) if isinstance(v, list) else v) for k, v in entry.items())
    given: dict[str, Any] = dict(known)
    targets, file = given.pop("targets", ()), None
    if "file" in given:
        stored = given.pop("file"), given.pop("sha256")
        file = files.DataFile(*stored, _FETCHED.get(name), "bundled" in given)
    if name in _READERS:
        return Source(_READERS[name], file, targets)
    read = read_text if "text" in given else read_table
    return Source(partial(read, **given), file, targets)


_TABLE = tomllib.loads(Path(__file__).with_name("datasets.toml").read_text("utf-8"))
SOURCES = {name: _source(name, entry) for name, entry in _TABLE.items()}


def dataset_names() -> tuple[str, ...]:
    """Return the names that :func:`load_dataset` takes.

    Examples
    --------
    >>> dataset_names()[:3]
    ('breast-cancer', 'diabetes', 'digits')
    """
    return tuple(SOURCES)


def load_dataset(
    name: str,
    *,
    data_dir: Path | None = None,
    target: str | None = None,
    limit: int | None = None,
) -> Dataset:
    """Load a dataset; equal arguments give the same object within a process.

    Parameters
    ----------
    name : str
        One of :func:`dataset_names`.
    data_dir : Path | None (default: None)
        Folder of the dataset files; None searches :func:`data_folders`.
    target : str | None (default: None)
        The target of a dataset with several: ``"melanoma"`` (the default), ``"dx"`` or
        ``"rare-melanoma"`` for ``ham10000``.
    limit : int | None (default: None)
        Number of rows to keep; None keeps all. Files are often sorted by label, so
        the rows are drawn at random with a fixed seed and kept in file order. A
        smaller limit keeps a subset of the rows of a larger one.

    Examples
    --------
    >>> len(load_dataset("digits", limit=100))
    100
    """
    check_name("dataset", name, SOURCES)
    source = SOURCES[name]
    if target is not None and target not in source.targets:
        choice = ", ".join(source.targets) or "none, leave it out"
        text = f"dataset '{name}' has no target '{target}'; its targets: {choice}"
        raise ConfigError(text)
    require(limit is None or limit >= 1, "limit", "at least 1", limit)
    path = None if source.file is None else files.locate(source.file, data_dir)
    chosen = target or (source.targets[0] if source.targets else None)
    return _rows(name, path, chosen, limit)


@lru_cache(maxsize=64)
def _rows(
    name: str, path: Path | None, target: str | None, limit: int | None
) -> Dataset:
    if limit is None:
        return SOURCES[name].read(name, path, target)
    dataset = _rows(name, path, target, None)
    order = np.random.default_rng(0).permutation(len(dataset))
    return dataset if limit >= len(dataset) else dataset.take(np.sort(order[:limit]))
