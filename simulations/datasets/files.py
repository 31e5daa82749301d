"""Where dataset files are, and whether they are what they should be."""

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
        A folder to search first. None: the folder that the environment variable
        ``FLOWER_VFL_DATA`` names, or else ``../shared/data`` as seen from the current
        folder and from the checkout of this project.

    Returns
    -------
    list[Path]
        Existing or not; the cache folder comes last.
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
    """Return the verified path of a dataset file, fetching it if that is allowed."""
    folders = data_folders(data_dir)
    for folder in folders:
        path = folder / file.name
        if path.is_file():
            verify(path, file.sha256)
            return path
    if file.bundled:
        return None
    if file.fetch is None:
        places = " or ".join(f"'{folder}'" for folder in folders)
        raise ConfigError(
            f"the dataset file '{file.name}' is missing and may not be downloaded "
            f"automatically; put it (sha256 {file.sha256}) into {places}, or name its "
            f"folder in the environment variable {ENVIRONMENT_VARIABLE}"
        )
    return _fetch(file, file.fetch)


def verify(path: Path, sha256: str) -> None:
    """Refuse a file whose checksum is not the expected one.

    A file that was fetched by this package is compared with the checksum that was
    written beside it.
    """
    status = path.stat()
    found = _checksum(path, status.st_mtime_ns, status.st_size)
    beside = _beside(path)
    expected = sha256
    if beside.is_file() and path.parent == cache_folder():
        expected = beside.read_text(encoding="ascii").strip()
    if found not in (sha256, expected):
        raise ConfigError(
            f"the dataset file '{path}' is damaged or another version: its sha256 is "
            f"{found}, expected {expected}; delete it and get it again"
        )


@lru_cache(maxsize=64)
def _checksum(path: Path, changed: int, size: int) -> str:
    """Return the SHA-256 of a file; time and size make the cache notice a change."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _fetch(file: DataFile, fetch: Callable[[Path], pd.DataFrame]) -> Path:
    """Get a table from a public place and keep it, with its checksum, in the cache."""
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
    # The same bytes for the same table: processes that fetch at once do not clash.
    frame.to_csv(draft, index=False, compression={"method": "gzip", "mtime": 0})
    status = draft.stat()
    checksum = _checksum(draft, status.st_mtime_ns, status.st_size)
    note = folder / f".{os.getpid()}-{file.name}.sha256"
    note.write_text(checksum + "\n", encoding="ascii")
    note.replace(_beside(path))
    draft.replace(path)
    return path
