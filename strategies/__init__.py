"""Strategies and gradient transforms."""

from .compose import Compose, PerParty, Scheduled
from .defenses import DEFENSES, build_defense, defense_spec
from .iso import Iso
from .max_norm import MaxNorm
from .no_defense import NoDefense
from .run_state import VerticalResult
from .stopping import EarlyStopping
from .vertical import PLACEMENTS, Placement, VerticalStrategy

__all__ = [
    "DEFENSES",
    "PLACEMENTS",
    "Compose",
    "EarlyStopping",
    "Iso",
    "MaxNorm",
    "NoDefense",
    "PerParty",
    "Placement",
    "Scheduled",
    "VerticalResult",
    "VerticalStrategy",
    "build_defense",
    "defense_spec",
]
