"""A party's own settings of an alignment, and the files of its keys."""

from __future__ import annotations

import base64
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flower_vfl.errors import ConfigError, PartyError, check_name

from .channel import Identity
from .ids import Normaliser
from .psu import METHODS


@dataclass(frozen=True)
class AlignmentSettings:
    """A party's own settings of an alignment, which win over the strategy's.

    Parameters
    ----------
    identity : Identity | None (default: None)
        Its long-term key pair; needed with pins.
    pins : Mapping[str, bytes] | None (default: None)
        Public keys of the other parties by name; its own may be among them.
    trust_server : bool (default: False)
        Whether it takes part without pins. The server could then read the lists.
    normalise : Normaliser | str | None (default: None)
        As for `encode_ids`. All parties need the same.
    methods : tuple[str, ...] (default: ("psu", "psi"))
        Methods that the party takes part in. In an intersection every party learns
        which of its ids all others have; ``("psu",)`` refuses that.
    min_padding : int (default: 0)
        Least number of dummy ids of each party that it takes part with.
    merging : tuple[str, ...] (default: ())
        Parties that may merge the lists; empty for any. A merging party that deviates
        can learn who is shared, and nobody notices.

    Examples
    --------
    >>> bank, shop = Identity(), Identity()
    >>> own = AlignmentSettings(bank, {"shop": shop.public}, normalise="lower_email")
    >>> own.methods
    ('psu', 'psi')
    """

    identity: Identity | None = None
    pins: Mapping[str, bytes] | None = None
    trust_server: bool = False
    normalise: Normaliser | str | None = None
    methods: tuple[str, ...] = tuple(METHODS)
    min_padding: int = 0
    merging: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for method in self.methods:
            check_name("alignment method", method, METHODS)

    @classmethod
    def from_node(cls, config: Mapping[str, object]) -> AlignmentSettings:
        """Return the settings in a node config."""
        key, pins = config.get("alignment-key"), config.get("alignment-pins")
        padding = config.get("min-padding", 0)
        if isinstance(padding, bool) or not isinstance(padding, int):
            raise ConfigError(f"min-padding must be a whole number, got '{padding}'")
        return cls(
            None if not key else read_key(Path(str(key))),
            None if not pins else read_pins(str(pins)),
            trusts_server(config) or False,
            str(config.get("alignment-normalise") or "") or None,
            _names(config, "alignment-methods") or tuple(METHODS),
            padding,
            _names(config, "merging-party"),
        )

    def check(self, name: str, padding: int, merging: str) -> None:
        """Refuse an alignment with too few dummy ids or another merging party."""
        if padding < self.min_padding:
            problem = f"takes part with {self.min_padding} dummy ids or more"
            remedy = f"Set padding={self.min_padding}, or min-padding of that node"
            raise PartyError(name, f"{problem}, not with {padding}", remedy)
        if self.merging and merging not in self.merging:
            problem = f"does not let '{merging}' merge the lists"
            remedy = "The ring's first party merges; see merging-party of that node"
            raise PartyError(name, problem, remedy)

    def pins_of_others(self, name: str) -> dict[str, bytes] | None:
        """Return the pins of all but the named party, after a check of its own."""
        if self.pins is None:
            return None
        mine, identity = self.pins.get(name), self.identity
        if mine is not None and identity is not None and mine != identity.public:
            raise ConfigError(f"the key that is pinned for '{name}' is not its own key")
        return {other: key for other, key in self.pins.items() if other != name}


def _names(config: Mapping[str, object], key: str) -> tuple[str, ...]:
    given = str(config.get(key) or "")
    return tuple(name.strip() for name in given.split(",") if name.strip())


def trusts_server(config: Mapping[str, object]) -> bool | None:
    """Return `trust-server` of a node config, None if it is not set."""
    trust = config.get("trust-server")
    if trust is None or isinstance(trust, bool):
        return trust
    # the text "false" would count as true
    raise ConfigError(f"trust-server must be true or false, got '{trust}'")


def read_key(path: Path) -> Identity:
    """Return the key pair in a file that only its owner can read."""
    path = path.expanduser()
    try:
        others = path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"make one with 'flower-vfl key {path}'"
        problem = f"the private key '{path}' cannot be read ({error}); {remedy}"
        raise ConfigError(problem) from None
    if os.name == "posix" and others:
        raise ConfigError(
            f"the private key '{path}' can be read by others; run 'chmod 600 {path}', "
            "and create a new key if someone may have read this one"
        )
    return Identity(parse_key(text, f"'{path}'"))


def write_key(path: Path) -> Identity:
    """Write a new key pair to a new file that only its owner can read."""
    identity = Identity()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        handle = os.open(path.expanduser(), flags, 0o600)
    except FileExistsError:
        problem = f"'{path}' exists already and may be pinned by others"
        raise ConfigError(f"{problem}; choose another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written ({error})") from None
    with os.fdopen(handle, "w") as file:
        file.write(key_text(identity.private_bytes()) + "\n")
    return identity


def read_pins(given: str) -> dict[str, bytes]:
    """Return public keys by name, from a TOML file or from ``name=key,name=key``."""
    pairs: dict[str, object] = {}
    if given.endswith(".toml"):
        try:
            pairs = tomllib.loads(Path(given).expanduser().read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the pins '{given}' cannot be read ({error})") from None
    else:
        for part in given.split(","):
            name, separator, key = (each.strip() for each in part.partition("="))
            if not (name and separator):
                form = "name=key,name=key or a .toml file"
                raise ConfigError(f"'{part}' is not a pin; write {form}")
            if name in pairs:
                raise ConfigError(f"two keys are pinned for '{name}'")
            pairs[name] = key
    return {name: parse_key(key, f"the pin of '{name}'") for name, key in pairs.items()}


def key_text(key: bytes) -> str:
    """Return a key as text."""
    return base64.b64encode(key).decode()


def parse_key(text: object, what: str) -> bytes:
    """Return the 32 bytes of a key."""
    plain = text.strip() if isinstance(text, str) else ""
    try:
        is_hex = len(plain) == 64
        key = bytes.fromhex(plain) if is_hex else base64.b64decode(plain, validate=True)
    except ValueError:
        key = b""
    if len(key) != 32:
        form = "a key of 32 bytes in base64 or hexadecimal digits"
        raise ConfigError(f"{what} is not {form}")
    return key
