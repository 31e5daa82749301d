"""What the messages of the alignment handshake carry.

Every ``ALIGN`` request has a ``stage``:

- ``begin`` brings the invitation; the reply is the party's hello and its number of ids;
- ``meet`` brings the hellos of all parties; the reply has the first parts of letters;
- ``relay`` brings parts of letters, perhaps none; the reply has parts, perhaps none,
  and says whether there are more;
- ``finish`` ends the handshake: the party forgets its keys; the reply has a digest of
  the universal ids and the sizes of all lists, which must be the same at all parties;
- ``place`` puts the party on the aligned rows, those of the handshake or those that it
  has kept from an earlier run; the reply has their number and a digest of its split;
- ``drop`` makes a party forget a handshake that failed elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from enum import StrEnum
from typing import cast

from flower_vfl.errors import ConfigError
from flower_vfl.protocol.messages import Content, Value

from . import Header, Hello, Sealed
from .handshake import Invitation


class Stage(StrEnum):
    """The stages of a handshake."""

    BEGIN = "begin"
    MEET = "meet"
    RELAY = "relay"
    FINISH = "finish"
    PLACE = "place"
    DROP = "drop"


def pack_invitation(invitation: Invitation) -> dict[str, Value]:
    """Return an invitation as the config of a message."""
    return {
        "session": invitation.session,
        "method": invitation.method,
        "group": invitation.group,
        "ring": list(invitation.ring),
        "padding": invitation.padding,
        "part-bytes": invitation.part_bytes,
    }


def unpack_invitation(content: Content) -> Invitation:
    """Return the invitation that a message carries."""
    return Invitation(
        session=_bytes(content, "session"),
        method=content.text("method"),
        group=content.text("group"),
        ring=tuple(cast(list[str], _list(content, "ring", str))),
        padding=content.number("padding"),
        part_bytes=content.number("part-bytes"),
    )


def pack_hellos(hellos: Sequence[Hello]) -> dict[str, Value]:
    """Return hellos as the config of a message."""
    return {
        "senders": [hello.sender for hello in hellos],
        "identities": [hello.identity for hello in hellos],
        "fresh-keys": [hello.fresh for hello in hellos],
    }


def unpack_hellos(content: Content) -> list[Hello]:
    """Return the hellos that a message carries."""
    senders = cast(list[str], _list(content, "senders", str))
    identities = cast(list[bytes], _list(content, "identities", bytes))
    fresh = cast(list[bytes], _list(content, "fresh-keys", bytes))
    if not len(senders) == len(identities) == len(fresh):
        raise ConfigError("a message has hellos without keys")
    return [Hello(*each) for each in zip(senders, identities, fresh, strict=True)]


def pack_parts(parts: Sequence[Sealed]) -> dict[str, Value]:
    """Return sealed parts as the config of a message."""
    heads = [json.dumps([*astuple(part.header), part.number]) for part in parts]
    return {"heads": heads, "contents": [part.content for part in parts]}


def unpack_parts(content: Content) -> list[Sealed]:
    """Return the sealed parts that a message carries."""
    heads = cast(list[str], _list(content, "heads", str))
    contents = cast(list[bytes], _list(content, "contents", bytes))
    if len(heads) != len(contents):
        raise ConfigError("a message has parts of letters without their heads")
    return [_sealed(h, c) for h, c in zip(heads, contents, strict=True)]


_HEAD = (str, str, int, str, str, int, int, int, int)  # Header's fields and the number


def _sealed(head: str, content: bytes) -> Sealed:
    try:
        fields = json.loads(head)
    except ValueError:
        fields = None
    if not isinstance(fields, list) or tuple(map(type, fields)) != _HEAD:
        raise ConfigError("a message has a part of a letter with a head that is none")
    if any(isinstance(f, int) and not 0 <= f < 1 << 63 for f in fields):
        raise ConfigError("a message has a part of a letter with impossible numbers")
    return Sealed(Header(*fields[:-1]), fields[-1], content)


def unpack_sizes(content: Content) -> list[int]:
    """Return how many ids each party has announced, and how many rows were aligned."""
    return cast(list[int], _list(content, "sizes", int))


def digest_key(content: Content) -> bytes:
    """Return the key of a session's digests."""
    return _bytes(content, "key")


def _bytes(content: Content, key: str) -> bytes:
    value = content.config.get(key)
    if not isinstance(value, bytes):
        raise ConfigError(f"message entry '{key}' must be bytes")
    return value


def _list(content: Content, key: str, kind: type) -> list[object]:
    value = content.config.get(key)
    if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
        raise ConfigError(f"message entry '{key}' must be a list of {kind.__name__}")
    return list(value)
