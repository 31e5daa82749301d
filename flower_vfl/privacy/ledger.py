"""The label party's file of what its trainings have revealed about the same labels."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from filelock import FileLock

from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import write_private
from flower_vfl.randomness import draw_secret

from .accountant import Guarantee, Release


class Ledger:
    """A file with the key of all draws, and every release of labels made with it.

    Only its owner can read it. Two processes may use it at once, and a crash leaves the
    old file or the new one. Whoever reads it can undo the draws.

    Parameters
    ----------
    path : Path | str
        The file; it is made when it is first used.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> from flower_vfl.privacy import Ledger, Release
    >>> ledger = Ledger(f"{mkdtemp()}/labels.json")
    >>> release = Release("randomised-response", epsilon=1.0)
    >>> for labels in ("digest of labels", "digest of labels", "digest of others"):
    ...     print(ledger.register(release, labels).epsilon)
    1.0
    1.0
    2.0
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()

    @property
    def key(self) -> int:
        """The key of all draws, of 256 bits."""
        with self._lock():
            content = self._read()
            self._write(content)
        return int(content["key"], 16)

    def register(self, release: Release, digest: str, note: bool = True) -> Guarantee:
        """Note a release, unless it was made before; return what holds after it.

        The keyed `digest` is of labels and ids: the same labels, randomised in the same
        way with the same key, reveal nothing new. With `note` False, only ask.
        """
        with self._lock():
            content = self._read()
            entry = {**asdict(release), "labels": digest}
            if entry not in content["releases"]:
                content["releases"].append(entry)
            found = Guarantee.of(_releases(content))
            if note:
                self._write(content)
        return found

    def _lock(self) -> FileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{self.path}.lock", timeout=60.0, mode=0o600)

    def _write(self, content: dict[str, Any]) -> None:
        write_private(self.path, json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        """Return the content of the file, or that of a new one."""
        if not self.path.exists():
            return {"key": f"{draw_secret():064x}", "releases": []}
        try:
            content: dict[str, Any] = json.loads(self.path.read_bytes())
            if len(bytes.fromhex(content["key"])) != 32:
                raise ValueError("the key is incomplete")
            _releases(content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the ledger of label releases '{self.path}' cannot be read "
                f"({type(error).__name__}); restore it from a backup. A new one has "
                "another key, and labels that are drawn again reveal more"
            ) from None
        return content


def _releases(content: dict[str, Any]) -> list[Release]:
    names = [field.name for field in fields(Release)]
    return [Release(**{name: e[name] for name in names}) for e in content["releases"]]
