"""Alignment of ids before training: private set union, or intersection.

Nothing in here knows about Flower: parties take lists and return lists.
"""

from __future__ import annotations

from .chunks import ChunkCodec, settings
from .elements import Elements, Group, InvalidElementError
from .groups import DEFAULT_GROUP, GROUPS, make_group
from .ids import NORMALISERS, e164, encode_ids, lower_email
from .keys import METHODS, AlignmentSettings
from .lists import ListError
from .padding import padding_delta
from .psi import PsiParty
from .psu import PsuParty
from .result import Alignment
from .ring import Member, RoundMessage, relay
from .sealing import Header, Hello, Identity, Sealed, SealError, SecureChannel

__all__ = [
    "DEFAULT_GROUP",
    "GROUPS",
    "METHODS",
    "NORMALISERS",
    "Alignment",
    "AlignmentSettings",
    "ChunkCodec",
    "Elements",
    "Group",
    "Header",
    "Hello",
    "Identity",
    "InvalidElementError",
    "ListError",
    "Member",
    "PsiParty",
    "PsuParty",
    "RoundMessage",
    "SealError",
    "Sealed",
    "SecureChannel",
    "e164",
    "encode_ids",
    "lower_email",
    "make_group",
    "padding_delta",
    "relay",
    "settings",
]
