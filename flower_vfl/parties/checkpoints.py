"""A party's checkpoints, on its own disk or in its node's Flower state.

A file has its content first, which ``torch.load`` reads, and in its last line a digest
and its origin, so that a damaged file or that of another party or run is never used.
"""

import hashlib
import io
import json
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyError

FINAL = "final"  # tag of the checkpoint that a run ends with
_NUMBERED = re.compile(r"(step|best)-(\d+)")
_RECORD = "flower_vfl.checkpoint."


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
        allowed = "use lower-case letters, digits, dashes"
        raise ConfigError(f"'{tag}' cannot name a checkpoint; {allowed}")
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
        problem = f"could not write '{what}': {error.strerror or type(error).__name__}"
        remedy = "Free disk space or correct the permissions, and start the run again; "
        remedy += "earlier checkpoints are unchanged"
        raise PartyError(party, problem, remedy) from error


def _digest(content: bytes, origin: str) -> str:
    digest = hashlib.blake2b(content)
    digest.update(origin.encode())
    return digest.hexdigest()


class RecordStore:
    """Checkpoints as records of the node's Flower state, for nodes without a folder."""

    owner = ""  # whose files they are; nobody else writes a node's Flower state

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def save(self, tag: str, state: dict[str, Any], run: str = "") -> str:
        """Keep a state under a tag; return the digest of what was written."""
        # Salted: the digest leaves this node, and must not tell what it is of.
        origin = [self.owner, check_tag(tag), run, secrets.token_hex(16)]
        content, line = to_bytes(state), json.dumps(origin)
        digest = _digest(content, line)
        self._put(tag, content + f"\n{digest} {line}".encode())
        return digest

    def load(self, tag: str, run: str = "", digest: str = "") -> dict[str, Any]:
        """Return the state of a tag: that of a run, and with a digest, where given."""
        if check_tag(tag) not in self.tags():
            kept = ", ".join(self.tags()) or "none"
            raise DamagedError(f"there is no checkpoint '{tag}'; kept: {kept}")
        problem, content = "", b""
        try:
            content, _, end = self._get(tag).rpartition(b"\n")
            found, _, line = end.decode(errors="replace").partition(" ")
            whole = found == _digest(content, line)
            owner, under, of_run, _ = json.loads(line) if whole else [""] * 4
            if not whole:
                problem = "is damaged, or of another version of flower-vfl"
            elif (owner, under) != (self.owner, tag):
                problem = f"is '{under}' of party '{owner}'"
            elif run and run != of_run:
                problem = "is of another run"
            elif digest and digest != found:
                problem = "was written at another time"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem:
            log(WARNING, "%s %s", self._place(tag), problem)  # the path stays here
            raise DamagedError(f"its checkpoint '{tag}' {problem}")
        return from_bytes(content)

    def prune(self, keep: Collection[str]) -> None:
        """Remove the checkpoints of steps and best epochs that are not to be kept."""
        for tag in self.tags():
            if _NUMBERED.fullmatch(tag) and tag not in keep:
                self.remove(tag)

    def clean(self) -> None:
        """Remove what a writer that was killed has left behind."""

    def tags(self) -> list[str]:
        """Return the tags that are kept."""
        size = len(_RECORD)
        return sorted(key[size:] for key in self.records if key.startswith(_RECORD))

    def remove(self, tag: str) -> None:
        """Remove a checkpoint, if there is one."""
        self.records.pop(_RECORD + tag, None)

    def _place(self, tag: str) -> str:
        return _RECORD + tag

    def _get(self, tag: str) -> bytes:
        data = self.records.config_records[self._place(tag)]["state"]
        return data if isinstance(data, bytes) else b""

    def _put(self, tag: str, data: bytes) -> None:
        self.records[self._place(tag)] = ConfigRecord({"state": data})


class DirectoryStore(RecordStore):
    """Checkpoints as files, written so that a crash leaves the old or the new one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = folder.name

    def clean(self) -> None:
        """Remove what a writer that was killed has left behind."""
        for path in self.folder.glob("*.tmp"):
            with suppress(OSError):
                path.unlink()

    def tags(self) -> list[str]:
        """Return the tags that are kept."""
        return sorted(path.stem for path in self.folder.glob("*.pt"))

    def remove(self, tag: str) -> None:
        """Remove a checkpoint, if there is one."""
        Path(self._place(tag)).unlink(missing_ok=True)

    def _place(self, tag: str) -> str:
        return str(self.folder / f"{tag}.pt")

    def _get(self, tag: str) -> bytes:
        return Path(self._place(tag)).read_bytes()

    def _put(self, tag: str, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        write_private(Path(self._place(tag)), data)


def open_store(context: Context, party: str) -> RecordStore:
    """Return where a node keeps its checkpoints."""
    folder = context.node_config.get("state-dir") or context.run_config.get("state-dir")
    if not folder:
        return RecordStore(context.state)
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", party).lstrip(".") or "party"
    if safe != party:  # two names must not become one folder
        safe += "-" + hashlib.blake2b(party.encode(), digest_size=4).hexdigest()
    return DirectoryStore(Path(str(folder)).expanduser() / safe)
