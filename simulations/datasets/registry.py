"""The datasets by name."""

from __future__ import annotations

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
from .readers import TableReader, TextReader
from .types import Dataset

Reader = Callable[[str, Any, str | None], Dataset]  # name, file, target


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from."""

    read: Reader
    file: DataFile | None = None
    targets: tuple[str, ...] = ()


_CRITEO_COUNTS = tuple(f"I{i}" for i in range(1, 14))
_GIVE_ME_SOME_CREDIT_TAILS = (
    "RevolvingUtilizationOfUnsecuredLines",
    "DebtRatio",
    "MonthlyIncome",
    "NumberOfTime30-59DaysPastDueNotWorse",
    "NumberOfTime60-89DaysPastDueNotWorse",
    "NumberOfTimes90DaysLate",
)
_CRITEO_CODES = tuple(f"C{i}" for i in range(1, 27))
_BREAST_CANCER = TableReader(
    "target", classes=("malignant", "benign"), bundled=bundled.load_breast_cancer
)

# Bundled datasets need no file. "wdbc" is the same table as "breast-cancer", and
# "diabetes-raw" is "diabetes" in its original units: both are read from their file if
# it exists, else from scikit-learn's equal copy.
SOURCES: dict[str, Source] = {
    "breast-cancer": Source(_BREAST_CANCER),
    "diabetes": Source(
        TableReader("target", task="regression", bundled=bundled.load_diabetes)
    ),
    "digits": Source(
        TableReader(
            "target",
            task="multiclass",
            classes=tuple("0123456789"),
            bundled=bundled.load_digits,
        )
    ),
    "spambase": Source(
        TableReader("spam", classes=("ham", "spam")),
        DataFile(
            "spambase.csv.gz",
            "4ea6a024e0a27412921491096044a90363223c39bd667c4aae54bbea1b9f4159",
            fetch=openml.SPAMBASE,
        ),
    ),
    "credit-default": Source(
        TableReader(
            "default.payment.next.month",
            classes=("paid", "default"),
            ids="ID",
            categorical=("SEX", "EDUCATION", "MARRIAGE"),
        ),
        DataFile(
            "credit_default_uci.csv.gz",
            "9f9e0177d3b961ad2d30c0892c692a88421e66aafef852bc137f6af018cf6210",
            fetch=openml.CREDIT_DEFAULT,
        ),
    ),
    "boston": Source(
        TableReader("medv", task="regression"),
        DataFile(
            "boston_housing.csv.gz",
            "54fdb9e36e89ca3f65bb63c578e82b3c95cf6c90fe5246608e1e3c91d7aa5443",
            fetch=openml.BOSTON,
        ),
    ),
    "diabetes-raw": Source(
        TableReader(
            "target",
            task="regression",
            bundled=partial(bundled.load_diabetes, scaled=False),
        ),
        DataFile(
            "diabetes_sklearn.csv.gz",
            "705fb7793d23c35b3fd1d0e2d180cd321ada3394c79d94652a3e978075b88f4f",
            bundled=True,
        ),
    ),
    "wdbc": Source(
        _BREAST_CANCER,
        DataFile(
            "breast_cancer_wdbc.csv.gz",
            "a5e7126b40b320149240363bbb0221ac13f42a9b2740a7b52674042a009a60b7",
            bundled=True,
        ),
    ),
    "give-me-some-credit": Source(
        TableReader(
            "SeriousDlqin2yrs",
            classes=("paid", "delinquent"),
            log_columns=_GIVE_ME_SOME_CREDIT_TAILS,
        ),
        DataFile(
            "give_me_some_credit.csv.gz",
            "1b23b719ced4fa08bb1d38ca95edd46f8a57dcdfce8572adef06f5a4efcd1243",
        ),
    ),
    "adult": Source(
        TableReader("income", classes=("<=50K", ">50K"), test="is_test"),
        DataFile(
            "adult_income.csv.gz",
            "5825e8c3a3e5d007fa4b93d05c9123aeb7c924c67d479a743e441ebd79c4a08e",
            fetch=openml.ADULT,
        ),
    ),
    "criteo": Source(
        TableReader(
            "label",
            classes=("no click", "click"),
            categorical=_CRITEO_CODES,
            log_columns=_CRITEO_COUNTS,
        ),
        DataFile(
            "criteo_8k.csv.gz",
            "6e502bf7a8e892d6f6eefafd0d085740cec82f55e4b073063ed2d4f99d972192",
        ),
    ),
    "criteo-indexed": Source(
        TableReader(
            "label", classes=("no click", "click"), test="is_test", categorical=("*",)
        ),
        DataFile(
            "criteo_20k_indexed.csv.gz",
            "089eb52fcb6436866f70ee023ee82b243bbda3302ae500b010d33d0a465fd547",
        ),
    ),
    "avazu": Source(
        TableReader(
            "click", classes=("no click", "click"), ids="id", categorical=("*",)
        ),
        DataFile(
            "avazu_9k.csv.gz",
            "fc3243ccf4e1eaf44449e31fe892899340c836d7f2cad604e77972a98abbba13",
        ),
    ),
    "imdb": Source(
        readers.read_imdb,
        DataFile(
            "imdb_top500_multihot.npz",
            "54004204778f097e9d2eaabb36e809e2316d1fa0a7728c64d6f9abba96db6a32",
        ),
    ),
    "ham10000": Source(
        readers.read_ham10000,
        DataFile(
            "ham10000_64x64_jpeg.npz",
            "ebf3ef83007f4dc1cd4e75c1db2ddfacabb09eec978371cb2cf318ddd9eed22e",
        ),
        targets=("melanoma", "dx"),
    ),
    "bhi": Source(
        readers.read_bhi,
        DataFile(
            "bhi_idc_50x50_jpeg.npz",
            "102d737c7a318e5294a959e8729f1ac34d1ac3f2ada93ff2de6bde252816e0f4",
        ),
    ),
    "cifar10": Source(
        readers.read_cifar10,
        DataFile(
            "cifar10_5k.npz",
            "f5b9c553923987300329da2ade0b4c72601c4a3cb083f5a26390b9109fe3374f",
        ),
    ),
    "yahoo-answers": Source(
        TextReader("text", "label", ("society_culture", "science_mathematics")),
        DataFile(
            "yahoo_answers_2topics.csv.gz",
            "525646edbc9224fcfebf7b6faba442b0b63b22f0f83771ddab2577c4de4ec422",
        ),
    ),
    "ag-news": Source(
        TextReader(
            "content", "label", ("World", "Sports", "Business", "Sci/Tech"), first=1
        ),
        DataFile(
            "ag_news_15k.csv.gz",
            "9ea7cbe34485ff0480ea7300cccc759ec0424b1d859bbb60f905592c7917c663",
        ),
    ),
}


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
