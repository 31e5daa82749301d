"""Alignment of ids before training: private set union, or intersection.

Nothing in here knows about Flower: parties take lists and return lists.
"""

from __future__ import annotations

from .elements import Elements, Group, InvalidElementError
from .groups import DEFAULT_GROUP, GROUPS, make_group
from .ids import NORMALISERS, e164, encode_ids, lower_email
from .keys import METHODS, AlignmentSettings
from .lists import ListError
from .padding import padding_delta
from .post import Post, settings
from .psi import PsiParty
from .psu import PsuParty
from .result import Alignment
from .ring import Letter, Member, relay
from .sealing import Header, Hello, Identity, Sealed, SealError, Seals

__all__ = [
    "DEFAULT_GROUP",
    "GROUPS",
    "METHODS",
    "NORMALISERS",
    "Alignment",
    "AlignmentSettings",
    "Elements",
    "Group",
    "Header",
    "Hello",
    "Identity",
    "InvalidElementError",
    "Letter",
    "ListError",
    "Member",
    "Post",
    "PsiParty",
    "PsuParty",
    "SealError",
    "Sealed",
    "Seals",
    "e164",
    "encode_ids",
    "lower_email",
    "make_group",
    "padding_delta",
    "relay",
    "settings",
]
