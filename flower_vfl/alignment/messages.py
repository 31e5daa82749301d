"""What travels in an alignment; docs/alignment.md ("The handshake") explains it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, TypeVar, cast

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.protocol.config import Value
from flower_vfl.protocol.messages import Content

from .elements import Elements, framed
from .groups import GROUPS
from .psu import METHODS, Phase

T = TypeVar("T")

REMEDY = "The handshake has ended and nothing of it was kept; start a new one"
_MAX_PADDING = 1 << 22  # dummy ids, which every party keeps in memory


class Stage(StrEnum):
    """The stages of a handshake."""

    BEGIN = "begin"
    KEYS = "keys"
    RELAY = "relay"
    FINISH = "finish"
    APPLY = "apply"
    DROP = "drop"


class Key:
    """The record keys of requests and replies."""

    STAGE = "stage"
    LIMIT = "limit"  # bytes of chunks in a reply
    SENDERS = "senders"
    IDENTITIES = "identities"
    SESSION_KEYS = "session-keys"
    HEADERS = "headers"
    CONTENTS = "contents"
    IDS = "ids"
    MORE = "more"
    EXPONENTIATIONS = "exponentiations"
    DIGEST_KEY = "key"
    ALIGNED = "aligned"  # digest of the universal ids
    SIZES = "sizes"
    ROWS = "rows"
    SPLIT_DIGEST = "split-digest"


@dataclass(frozen=True)
class HandshakeConfig:
    """What the strategy proposes to all parties."""

    session: bytes
    method: str
    group: str
    ring: tuple[str, ...]
    padding: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        check_name("alignment method", self.method, METHODS)
        check_name("group", self.group, GROUPS)
        if len(self.session) < 16:
            raise ConfigError("an alignment session needs a random name of 16 bytes")
        if not 0 <= self.padding <= _MAX_PADDING or self.chunk_bytes < 1:
            raise ConfigError("the padding or the chunk size is out of range")

    def agreed(self) -> bytes:
        """Return the settings that must be equal at all parties."""
        names = framed(*(name.encode() for name in self.ring))
        padding = str(self.padding).encode()
        return framed(self.method.encode(), self.group.encode(), names, padding)


@dataclass(frozen=True)
class Hello:
    """The public keys of a party: its identity, and its key of this session."""

    sender: str
    identity: bytes
    session_key: bytes


@dataclass(frozen=True)
class Header:
    """Which list is sent by whom to whom; the server can read it."""

    phase: Phase
    owner: str  # whose ids the list has; empty for the union and the universal ids
    hop: int  # how often the list has been sent, from 1
    sender: str
    receiver: str
    count: int  # elements of the whole list
    chunk: int = 0
    chunks: int = 1

    def to_bytes(self) -> bytes:
        """Return the bytes that are authenticated along with a chunk."""
        names = (self.phase, self.owner, self.sender, self.receiver)
        numbers = (self.hop, self.count, self.chunk, self.chunks)
        return framed(*(n.encode() for n in names), struct.pack(">4Q", *numbers))

    def to_list(self) -> list[str | int]:
        """Return the fields, for records and saved states."""
        return list(astuple(self))

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> Header:
        """Return the header that has these fields, after a check of their types."""
        if tuple(map(type, fields)) != (str, str, int, str, str, int, int, int):
            raise ConfigError("a message has a chunk with an invalid header")
        if any(isinstance(f, int) and not 0 <= f < 1 << 63 for f in fields):
            raise ConfigError("a message has a chunk whose numbers are out of range")
        return cls(*fields)


@dataclass(frozen=True, eq=False)
class RoundMessage:
    """A whole list and its header."""

    header: Header
    elements: Elements


@dataclass(frozen=True)
class EncryptedChunk:
    """A part of a list that only its receiver can read."""

    header: Header
    number: int  # counts the chunks from this sender to this receiver
    content: bytes


def pack_handshake(config: HandshakeConfig) -> dict[str, Value]:
    """Return a proposal as the config of a message."""
    return {**vars(config), "ring": list(config.ring)}


def unpack_handshake(content: Content) -> HandshakeConfig:
    """Return the proposal that a message carries."""
    return HandshakeConfig(
        session=read_bytes(content, "session"),
        method=content.text("method"),
        group=content.text("group"),
        ring=tuple(read_list(content, "ring", str)),
        padding=content.number("padding"),
        chunk_bytes=content.number("chunk_bytes"),
    )


def pack_hellos(hellos: Sequence[Hello]) -> dict[str, Value]:
    """Return hellos as the config of a message."""
    return {
        Key.SENDERS: [hello.sender for hello in hellos],
        Key.IDENTITIES: [hello.identity for hello in hellos],
        Key.SESSION_KEYS: [hello.session_key for hello in hellos],
    }


def unpack_hellos(content: Content) -> list[Hello]:
    """Return the hellos that a message carries."""
    senders = read_list(content, Key.SENDERS, str)
    identities = read_list(content, Key.IDENTITIES, bytes)
    session_keys = read_list(content, Key.SESSION_KEYS, bytes)
    if not len(senders) == len(identities) == len(session_keys):
        raise ConfigError("a message has hellos without keys")
    return list(map(Hello, senders, identities, session_keys))


def pack_chunks(chunks: Sequence[EncryptedChunk]) -> dict[str, Value]:
    """Return chunks as the config of a message."""
    headers = [json.dumps([*c.header.to_list(), c.number]) for c in chunks]
    return {Key.HEADERS: headers, Key.CONTENTS: [c.content for c in chunks]}


def unpack_chunks(content: Content) -> list[EncryptedChunk]:
    """Return the chunks that a message carries."""
    headers = read_list(content, Key.HEADERS, str)
    contents = read_list(content, Key.CONTENTS, bytes)
    if len(headers) != len(contents):
        raise ConfigError("a message has chunks without headers")
    chunks = []
    for text, encrypted in zip(headers, contents, strict=True):
        try:
            *fields, number = json.loads(text)
        except (TypeError, ValueError):
            raise ConfigError("a message has a chunk with an invalid header") from None
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ConfigError("a message has a chunk with an invalid number")
        chunks.append(EncryptedChunk(Header.from_list(fields), number, encrypted))
    return chunks


def read_bytes(content: Content, key: str) -> bytes:
    """Return an entry of bytes."""
    value = content.config.get(key)
    if not isinstance(value, bytes):
        raise ConfigError(f"message entry '{key}' must be bytes")
    return value


def read_list(content: Content, key: str, kind: type[T]) -> list[T]:
    """Return an entry that is a list of one type."""
    value = content.config.get(key)
    if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
        raise ConfigError(f"message entry '{key}' must be a list of {kind.__name__}")
    return cast(list[T], list(value))
