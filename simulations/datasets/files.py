"""Find, fetch and verify dataset files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flower_vfl.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

ENVIRONMENT_VARIABLE = "FLOWER_VFL_DATA"


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
    status = path.stat()
    found = _checksum(path, status.st_mtime_ns, status.st_size)
    stored = _checksum_file(path)
    expected = sha256
    if stored.is_file() and path.parent == cache_folder():
        expected = stored.read_text(encoding="ascii").strip()
    if found not in (sha256, expected):
        raise ConfigError(
            f"the dataset file '{path}' is damaged or another version: its sha256 is "
            f"{found}, expected {expected}; delete it and get it again"
        )


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
        raise ConfigError(
            f"the dataset file '{file.name}' is in none of the folders searched and "
            f"could not be fetched: {error}; or put the file (sha256 {file.sha256}) "
            f"into '{folder}'"
        ) from error
    path = folder / file.name
    draft = folder / f".{os.getpid()}-{file.name}"
    # Equal tables give equal bytes, so processes that fetch at once do not clash.
    frame.to_csv(draft, index=False, compression={"method": "gzip", "mtime": 0})
    status = draft.stat()
    checksum = _checksum(draft, status.st_mtime_ns, status.st_size)
    note = folder / f".{os.getpid()}-{file.name}.sha256"
    note.write_text(checksum + "\n", encoding="ascii")
    note.replace(_checksum_file(path))
    draft.replace(path)
    return path
