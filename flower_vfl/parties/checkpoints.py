"""A party's checkpoints, on its own disk or in its node's Flower state.

A file has its content first, which ``torch.load`` reads, then whose it is, and last a
digest of both, so that a damaged file or that of another party or run is never used.
"""

import hashlib
import io
import json
import os
import re
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyError

FINAL = "final"  # tag of the checkpoint that a run ends with
_NUMBERED = re.compile(r"(step|best)-(\d+)")
_RECORD = "flower_vfl.checkpoint."
_MARK, _DIGEST = b"flower-vfl 1", 32  # the last bytes of a file, after its digest


class DamagedError(ConfigError):
    """A stored file that cannot be used: missing, damaged, of another party or run."""


def step_tag(step: int) -> str:
    """Return the tag of the checkpoint of a step."""
    return f"step-{step}"


def tagged_step(tag: str) -> int | None:
    """Return the step of a tag that :func:`step_tag` made, or None for another tag."""
    match = _NUMBERED.fullmatch(tag)
    return int(match[2]) if match and match[1] == "step" else None


def steps_of(tags: Iterable[str]) -> list[int]:
    """Return the steps among some tags, the newest first."""
    steps = (tagged_step(tag) for tag in tags)
    return sorted((step for step in steps if step is not None), reverse=True)


def to_bytes(state: dict[str, Any]) -> bytes:
    """Return a state dictionary as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """Return a state dictionary; nothing but tensors and plain values is accepted."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def check_tag(tag: str) -> str:
    """Return a tag that is safe as a file name, or raise."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", tag):
        raise ConfigError(
            f"'{tag}' cannot name a checkpoint; use lower-case letters, digits, dashes"
        )
    return tag


def add_digest(content: bytes, *origin: str) -> tuple[bytes, str]:
    """Return a content with its origin and a digest of both at its end, and that."""
    header = json.dumps(origin).encode()
    whole = content + header + len(header).to_bytes(4, "big")
    digest = hashlib.blake2b(whole, digest_size=_DIGEST)
    return whole + digest.digest() + _MARK, digest.hexdigest()


def check_digest(data: bytes) -> tuple[bytes, list[str], str]:
    """Return what :func:`add_digest` was given, and the digest; or raise."""
    end = len(data) - len(_MARK) - _DIGEST
    whole, digest = data[: max(end, 0)], data[max(end, 0) : -len(_MARK)]
    found = hashlib.blake2b(whole, digest_size=_DIGEST).digest()
    if not data.endswith(_MARK) or found != digest:
        raise DamagedError("is damaged, or of another version of flower-vfl")
    size = int.from_bytes(whole[-4:], "big")
    content, header = whole[: -4 - size], whole[-4 - size : -4]
    return content, json.loads(header), digest.hex()


def write_private(target: Path, content: bytes) -> None:
    """Write a file that only its owner can read; a crash leaves the old or the new."""
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # so that the new name survives a power cut, too
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def writing(party: str, what: str) -> Iterator[None]:
    """Say in one line whose disk refused what, such as a full one."""
    try:
        yield
    except OSError as error:
        log(ERROR, "%s", error)  # with the path, which is only for this node's log
        raise PartyError(
            party,
            f"could not write '{what}': {error.strerror or type(error).__name__}",
            "Make space there, or correct the permissions, and start the run again; "
            "earlier checkpoints are as they were",
        ) from error


class Store(ABC):
    """Where checkpoints are kept, each with its origin and a digest."""

    owner = ""  # whose files they are; nobody else writes a node's Flower state

    def save(self, tag: str, state: dict[str, Any], run: str = "") -> str:
        """Keep a state under a tag; return the digest of what was written."""
        origin = self.owner, check_tag(tag), run
        salt = secrets.token_hex(16)  # the digest leaves this node and tells nothing
        data, digest = add_digest(to_bytes(state), *origin, salt)
        self._put(tag, data)
        return digest

    def load(self, tag: str, run: str = "", digest: str = "") -> dict[str, Any]:
        """Return the state of a tag: that of a run, and with a digest, where given."""
        what = f"its checkpoint '{tag}'"
        if check_tag(tag) not in self.tags():
            kept = ", ".join(self.tags()) or "none"
            raise DamagedError(f"there is no checkpoint '{tag}'; kept: {kept}")
        try:
            content, (owner, under, of_run, _), found = check_digest(self._get(tag))
        except OSError as error:
            raise DamagedError(f"{what} cannot be read: {error.strerror}") from error
        except DamagedError as error:
            raise DamagedError(f"{what} {error}") from None
        if (owner, under) != (self.owner, tag):
            raise DamagedError(f"{what} is '{under}' of party '{owner}'")
        if run and run != of_run:
            raise DamagedError(f"{what} is of another run")
        if digest and digest != found:
            raise DamagedError(f"{what} was written at another time")
        return from_bytes(content)

    def prune(self, keep: Collection[str]) -> None:
        """Remove the checkpoints of steps and best epochs that are not to be kept."""
        for tag in self.tags():
            if _NUMBERED.fullmatch(tag) and tag not in keep:
                self.remove(tag)

    def clean(self) -> None:  # noqa: B027 (only files can be left)
        """Remove what a writer that was killed has left behind."""

    def place(self, tag: str) -> str:
        """Return where a checkpoint is, for this node's own log."""
        return "the Flower state of this node"

    @abstractmethod
    def tags(self) -> list[str]:
        """Return the tags that are kept."""

    @abstractmethod
    def remove(self, tag: str) -> None:
        """Remove a checkpoint, if there is one."""

    @abstractmethod
    def _get(self, tag: str) -> bytes: ...

    @abstractmethod
    def _put(self, tag: str, data: bytes) -> None: ...


class DirectoryStore(Store):
    """Checkpoints as files, written so that a crash leaves the old or the new one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = folder.name

    def write(self, name: str, content: bytes) -> None:
        """Write a file that nobody else can read, in a folder of that kind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        write_private(self.folder / name, content)

    def clean(self) -> None:
        """Remove what a writer that was killed has left behind."""
        for path in self.folder.glob("*.tmp"):
            with suppress(OSError):
                path.unlink()

    def place(self, tag: str) -> str:
        """Return the path of a checkpoint."""
        return str(self.folder / f"{tag}.pt")

    def tags(self) -> list[str]:
        """Return the tags that are kept."""
        return sorted(path.stem for path in self.folder.glob("*.pt"))

    def remove(self, tag: str) -> None:
        """Remove a checkpoint, if there is one."""
        Path(self.place(tag)).unlink(missing_ok=True)

    def _get(self, tag: str) -> bytes:
        return Path(self.place(tag)).read_bytes()

    def _put(self, tag: str, data: bytes) -> None:
        self.write(f"{tag}.pt", data)


class RecordStore(Store):
    """Checkpoints as records of the node's Flower state, for nodes without a folder."""

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def tags(self) -> list[str]:
        """Return the tags that are kept."""
        size = len(_RECORD)
        return sorted(key[size:] for key in self.records if key.startswith(_RECORD))

    def remove(self, tag: str) -> None:
        """Remove a checkpoint, if there is one."""
        self.records.pop(_RECORD + tag, None)

    def _get(self, tag: str) -> bytes:
        data = self.records.config_records[_RECORD + tag]["state"]
        return data if isinstance(data, bytes) else b""

    def _put(self, tag: str, data: bytes) -> None:
        self.records[_RECORD + tag] = ConfigRecord({"state": data})


def open_store(context: Context, party: str) -> Store:
    """Return where a node keeps its checkpoints."""
    folder = context.node_config.get("state-dir") or context.run_config.get("state-dir")
    if not folder:
        return RecordStore(context.state)
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", party).lstrip(".") or "party"
    if safe != party:  # two names must not become one folder
        safe += "-" + hashlib.blake2b(party.encode(), digest_size=4).hexdigest()
    return DirectoryStore(Path(str(folder)).expanduser() / safe)
