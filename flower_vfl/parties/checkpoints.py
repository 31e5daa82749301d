"""A party's checkpoints, on its own disk or in its node's Flower state."""

import hashlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from flwr.app import ConfigRecord, Context, RecordDict

from flower_vfl.errors import ConfigError

_KEEP = 2  # step checkpoints kept per party: the newest and the one before
_STEP_TAG = re.compile(r"step-(\d+)")
_RECORD = "flower_vfl.checkpoint."


def step_tag(step: int) -> str:
    """Return the tag of the checkpoint of a step."""
    return f"step-{step}"


def tagged_step(tag: str) -> int | None:
    """Return the step of a tag that :func:`step_tag` made, or None for another tag."""
    match = _STEP_TAG.fullmatch(tag)
    return int(match[1]) if match else None


def to_bytes(state: dict[str, Any]) -> bytes:
    """Return a state dictionary as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """Return a state dictionary; nothing but tensors and plain values is accepted."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


class Store(Protocol):
    """Where checkpoints are kept."""

    def save(self, tag: str, state: dict[str, Any]) -> None:
        """Keep a state under a tag."""

    def load(self, tag: str) -> dict[str, Any]:
        """Return the state of a tag."""

    def tags(self) -> list[str]:
        """Return the tags that are kept."""


def outdated(tags: list[str], saved: str) -> list[str]:
    """Return the step checkpoints that a new one replaces."""
    last = tagged_step(saved)
    if last is None:
        return []
    numbered = ((tagged_step(tag), tag) for tag in tags)
    steps = sorted((step, tag) for step, tag in numbered if step is not None)
    kept = [tag for step, tag in steps if step <= last][-_KEEP:]
    return [tag for _, tag in steps if tag not in kept]


def check_tag(tag: str) -> str:
    """Return a tag that is safe as a file name, or raise."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", tag):
        raise ConfigError(
            f"'{tag}' cannot name a checkpoint; use lower-case letters, digits, dashes"
        )
    return tag


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


class DirectoryStore:
    """Checkpoints as files, written so that a crash leaves the old or the new one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, tag: str, state: dict[str, Any]) -> None:
        """Keep a state under a tag."""
        self.write(f"{check_tag(tag)}.pt", to_bytes(state))
        for old in outdated(self.tags(), tag):
            (self.folder / f"{old}.pt").unlink(missing_ok=True)

    def write(self, name: str, content: bytes) -> None:
        """Write a file that nobody else can read, in a folder of that kind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        write_private(self.folder / name, content)

    def load(self, tag: str) -> dict[str, Any]:
        """Return the state of a tag."""
        path = self.folder / f"{check_tag(tag)}.pt"
        if not path.is_file():
            raise ConfigError(f"there is no checkpoint '{tag}'; kept are {self.tags()}")
        return from_bytes(path.read_bytes())

    def tags(self) -> list[str]:
        """Return the tags that are kept."""
        return sorted(path.stem for path in self.folder.glob("*.pt"))


class RecordStore:
    """Checkpoints as records of the node's Flower state, for nodes without a folder."""

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def save(self, tag: str, state: dict[str, Any]) -> None:
        """Keep a state under a tag."""
        record = ConfigRecord({"state": to_bytes(state)})
        self.records[_RECORD + check_tag(tag)] = record
        for old in outdated(self.tags(), tag):
            del self.records[_RECORD + old]

    def load(self, tag: str) -> dict[str, Any]:
        """Return the state of a tag."""
        if tag not in self.tags():
            raise ConfigError(f"there is no checkpoint '{tag}'; kept are {self.tags()}")
        data = self.records.config_records[_RECORD + tag]["state"]
        assert isinstance(data, bytes)  # save() wrote it
        return from_bytes(data)

    def tags(self) -> list[str]:
        """Return the tags that are kept."""
        size = len(_RECORD)
        return sorted(key[size:] for key in self.records if key.startswith(_RECORD))


def open_store(context: Context, party: str) -> Store:
    """Return where a node keeps its checkpoints."""
    folder = context.node_config.get("state-dir") or context.run_config.get("state-dir")
    if not folder:
        return RecordStore(context.state)
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", party).lstrip(".") or "party"
    if safe != party:  # two names must not become one folder
        safe += "-" + hashlib.blake2b(party.encode(), digest_size=4).hexdigest()
    return DirectoryStore(Path(str(folder)).expanduser() / safe)
