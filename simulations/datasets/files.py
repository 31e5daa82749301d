"""Find and verify dataset files, or fetch openly licensed ones from OpenML."""

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.results import write_whole

ENVIRONMENT_VARIABLE = "FLOWER_VFL_DATA"
CREDIT_COLUMNS = (
    *("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"),
    *(f"PAY_{month}" for month in (0, 2, 3, 4, 5, 6)),
    *(f"BILL_AMT{month}" for month in range(1, 7)),
    *(f"PAY_AMT{month}" for month in range(1, 7)),
)
_ADULT_NUMBERS = "age fnlwgt education_num capital_gain capital_loss hours_per_week"
_ADULT_TEST_ROWS = 16281


@dataclass(frozen=True)
class DataFile:
    """A file that holds a dataset."""

    name: str
    sha256: str
    fetch: Callable[[Path], pd.DataFrame] | None = None
    bundled: bool = False


def cache_folder() -> Path:
    """Return the folder for fetched files: ``$XDG_CACHE_HOME/flower-vfl``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flower-vfl"


def data_folders(data_dir: Path | None = None) -> list[Path]:
    """Return the folders that are searched for dataset files, in order.

    Parameters
    ----------
    data_dir : Path | None (default: None)
        A folder to search first. None uses the environment variable
        ``FLOWER_VFL_DATA``, or else ``../shared/data`` relative to the current folder
        and to the clone of this project.

    Returns
    -------
    list[Path]
        The folders, existing or not; the cache folder comes last.

    Examples
    --------
    >>> data_folders(Path("."))[0]
    PosixPath('.')
    """
    named = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            source = "data_dir" if data_dir else ENVIRONMENT_VARIABLE
            raise ConfigError(f"{source} names '{folder}', which is not a folder")
        return [folder, cache_folder()]
    checkout = Path(__file__).resolve().parents[2]
    folders = [base.parent / "shared" / "data" for base in (Path.cwd(), checkout)]
    return [*dict.fromkeys(folders), cache_folder()]


def locate(file: DataFile, data_dir: Path | None = None) -> Path | None:
    """Return the verified path of a dataset file; fetch it if that is allowed."""
    folders = data_folders(data_dir)
    for folder in folders:
        path = folder / file.name
        if path.is_file():
            verify(path, file.sha256)
            return path
    if file.bundled:
        return None
    if file.fetch is None:
        searched = " or ".join(f"'{folder}'" for folder in folders)
        raise ConfigError(
            f"the dataset file '{file.name}' is missing and may not be downloaded "
            f"automatically; put it (sha256 {file.sha256}) into {searched}, or set the "
            f"environment variable {ENVIRONMENT_VARIABLE} to its folder"
        )
    return _fetch(file, file.fetch)


def verify(path: Path, sha256: str) -> None:
    """Refuse a file whose checksum differs from the expected or the fetched one."""
    status, stored, expected = path.stat(), _checksum_file(path), sha256
    found = _checksum(path, status.st_mtime_ns, status.st_size)
    if stored.is_file() and path.parent == cache_folder():
        expected = stored.read_text(encoding="ascii").strip()
    if found not in (sha256, expected):
        text = f"its sha256 is {found}, expected {expected}; delete it and get it again"
        raise ConfigError(f"the dataset file '{path}' is damaged or outdated: {text}")


@lru_cache(maxsize=64)
def _checksum(path: Path, changed: int, size: int) -> str:
    """Return the SHA-256 of a file; time and size invalidate the cache."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _fetch(file: DataFile, fetch: Callable[[Path], pd.DataFrame]) -> Path:
    """Download a table and store it, with its checksum, in the cache folder."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        frame = fetch(folder / "downloads")
    except ConfigError as error:
        text = f"the dataset file '{file.name}' could not be fetched: {error}"
        remedy = f"put it (sha256 {file.sha256}) into '{folder}'"
        raise ConfigError(f"{text}; {remedy}") from error
    path, buffer = folder / file.name, io.BytesIO()
    # Equal tables give equal bytes, so processes that fetch at once do not clash.
    frame.to_csv(buffer, index=False, compression={"method": "gzip", "mtime": 0})
    content = buffer.getvalue()
    checksum = hashlib.sha256(content).hexdigest()
    write_whole(_checksum_file(path), f"{checksum}\n".encode())
    write_whole(path, content)
    return path


@dataclass(frozen=True)
class OpenMLTable:
    """A table on OpenML; calling it downloads the table."""

    data_id: int
    tidy: Callable[[pd.DataFrame], pd.DataFrame]
    rows: int
    label: str
    label_sum: float

    def __call__(self, folder: Path) -> pd.DataFrame:
        """Download the table and check it."""
        place, home = f"OpenML (data id {self.data_id})", str(folder)
        from sklearn.datasets import fetch_openml

        try:
            bunch = fetch_openml(data_id=self.data_id, as_frame=True, data_home=home)
        except (OSError, ValueError, HTTPException) as error:
            raise ConfigError(f"{place} did not answer ({error})") from error
        try:
            frame = self.tidy(bunch.frame)
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"{place} has another layout ({error!r})") from error
        rows, total = len(frame), float(frame[self.label].sum())
        if rows != self.rows or not np.isclose(total, self.label_sum, rtol=1e-6):
            got = f"{place} gave {rows} rows whose labels add up to {total:g}"
            wanted = f"{self.rows} rows and {self.label_sum:g}"
            raise ConfigError(f"{got}, expected {wanted}")
        return frame


def tidy_spambase(frame: pd.DataFrame) -> pd.DataFrame:
    """Return data 44 with UCI's column names (``char_freq_%3B`` is ``char_freq_;``)."""
    numbers = frame.rename(columns=unquote).astype(float)
    label = numbers.pop("class").astype(int)
    return numbers.assign(spam=label)


def tidy_credit_default(frame: pd.DataFrame) -> pd.DataFrame:
    """Return data 42477, whose columns are x1 to x23 and y, with the names of UCI."""
    names = {f"x{i}": name for i, name in enumerate(CREDIT_COLUMNS, start=1)}
    lower = frame.rename(columns=str.lower)
    features = lower[list(names)].rename(columns=names).astype(float)
    whole = [n for n in CREDIT_COLUMNS if "AMT" not in n and "BAL" not in n]
    table = features.astype(dict.fromkeys(whole, int))
    table.insert(0, "ID", np.arange(1, len(table) + 1))
    label = lower["y"].astype(float).astype(int)
    return table.assign(**{"default.payment.next.month": label})


def tidy_adult(frame: pd.DataFrame) -> pd.DataFrame:
    """Return data 1590 in UCI's order, with ``?`` for a missing value."""
    names = [str(name).replace("-", "_") for name in frame.columns]
    table = frame.set_axis(names, axis="columns")
    income = table.pop("class").astype(str).str.strip()
    if not income.isin(["<=50K", ">50K"]).all():
        raise ValueError(f"unknown incomes {sorted(income.unique())}")
    for name in names:
        if name in _ADULT_NUMBERS.split():
            table[name] = table[name].astype(float).astype(int)
        elif name != "class":
            words = table[name].astype(object)
            table[name] = words.where(words.notna(), "?").astype(str).str.strip()
    is_test = (np.arange(len(table)) < _ADULT_TEST_ROWS).astype(int)
    table = table.assign(income=(income == ">50K").astype(int), is_test=is_test)
    found = int(table["income"][table["is_test"] == 1].sum())
    if found != 3846:
        raise ValueError(f"{found} high incomes in the test rows, expected 3846")
    return table.sort_values("is_test", kind="stable", ignore_index=True)


def tidy_boston(frame: pd.DataFrame) -> pd.DataFrame:
    """Return data 531 with lower-case names and numbers in every column."""
    return frame.rename(columns=str.lower).astype(float).astype({"chas": int})


SPAMBASE = OpenMLTable(44, tidy_spambase, 4601, "spam", 1813)
CREDIT_DEFAULT = OpenMLTable(
    42477, tidy_credit_default, 30000, "default.payment.next.month", 6636
)
ADULT = OpenMLTable(1590, tidy_adult, 48842, "income", 11687)
BOSTON = OpenMLTable(531, tidy_boston, 506, "medv", 11401.6)
