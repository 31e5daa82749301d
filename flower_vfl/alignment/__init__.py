"""Alignment of ids before training: private set union, or intersection."""

from .channel import Identity
from .groups import DEFAULT_GROUP, GROUPS
from .ids import NORMALISERS, e164, encode_ids, lower_email, padding_delta
from .keys import AlignmentSettings
from .psu import METHODS, AlignedIds

__all__ = [
    "DEFAULT_GROUP",
    "GROUPS",
    "METHODS",
    "NORMALISERS",
    "AlignedIds",
    "AlignmentSettings",
    "Identity",
    "e164",
    "encode_ids",
    "lower_email",
    "padding_delta",
]
