"""The datasets by name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets as bundled

from flower_vfl.errors import ConfigError, unknown_name

from . import openml, readers
from .files import DataFile, locate
from .types import Dataset

Reader = Callable[[str, Any, str | None], Dataset]  # name, file, target


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from."""

    read: Reader
    file: DataFile | None = None
    targets: tuple[str, ...] = ()


_FETCHED = {
    "spambase": openml.SPAMBASE,
    "credit-default": openml.CREDIT_DEFAULT,
    "boston": openml.BOSTON,
    "adult": openml.ADULT,
}
_BUNDLED: dict[str, Callable[..., Any]] = {
    "breast-cancer": bundled.load_breast_cancer,
    "wdbc": bundled.load_breast_cancer,
    "diabetes": bundled.load_diabetes,
    "diabetes-raw": partial(bundled.load_diabetes, scaled=False),
    "digits": bundled.load_digits,
}
_READERS: dict[str, Reader] = {
    "imdb": readers.read_imdb,
    "ham10000": readers.read_ham10000,
    "bhi": readers.read_bhi,
    "cifar10": readers.read_cifar10,
}


def _source(name: str, entry: dict[str, Any]) -> Source:
    """Return the source that an entry of ``datasets.toml`` describes."""
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in entry.items()
    }
    targets, file = given.pop("targets", ()), None
    if "file" in given:
        stored = given.pop("file"), given.pop("sha256")
        file = DataFile(*stored, _FETCHED.get(name), name in _BUNDLED)
    if name in _READERS:
        return Source(_READERS[name], file, targets)
    if "text" in given:
        return Source(partial(readers.read_text, **given), file, targets)
    given["bundled"] = _BUNDLED.get(name)
    return Source(partial(readers.read_table, **given), file, targets)


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
        The target of a dataset with several: ``"melanoma"`` (the default) or ``"dx"``
        for ``ham10000``.
    limit : int | None (default: None)
        Number of rows to keep; None keeps all. Files are often sorted by label, so
        the rows are drawn at random with a fixed seed and kept in file order. A
        smaller limit keeps a subset of the rows of a larger one.

    Examples
    --------
    >>> len(load_dataset("digits", limit=100))
    100
    """
    if name not in SOURCES:
        raise unknown_name("dataset", name, SOURCES)
    source = SOURCES[name]
    if target is not None and target not in source.targets:
        choice = ", ".join(source.targets) or "none, leave it out"
        raise ConfigError(
            f"dataset '{name}' has no target '{target}'; its targets: {choice}"
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    path = None if source.file is None else locate(source.file, data_dir)
    chosen = target or (source.targets[0] if source.targets else None)
    dataset = _whole(source, name, path, chosen)
    if limit is None or limit >= len(dataset):
        return dataset
    return _limited(dataset, limit)


@lru_cache(maxsize=32)
def _whole(source: Source, name: str, path: Path | None, target: str | None) -> Dataset:
    return source.read(name, path, target)


@lru_cache(maxsize=32)
def _limited(dataset: Dataset, limit: int) -> Dataset:
    order = np.random.default_rng(0).permutation(len(dataset))
    return dataset.take(np.sort(order[:limit]))
