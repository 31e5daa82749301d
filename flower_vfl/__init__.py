"""Vertical federated learning on Flower."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_vfl.errors import (
    ConfigError,
    PartyError,
    PartyRestartedError,
    VerticalError,
)
from flower_vfl.grids.in_process import InProcessGrid, in_process
from flower_vfl.objectives import CrossEntropy, MeanSquaredError, Objective
from flower_vfl.parties.imputation.row_index import Imputation
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.policies import NodePolicy
from flower_vfl.privacy import LabelPrivacy
from flower_vfl.protocol.client_app import vertical_client_app
from flower_vfl.randomness import Noise
from flower_vfl.transform import Batch, GradientTransform

if TYPE_CHECKING:
    from flower_vfl.grids.resident import ResidentGrid, resident
    from flower_vfl.leakage.monitor import Leakage
    from flower_vfl.strategies import VerticalStrategy, defended_grid, defense_mod

# In a clone, `strategies/` and `simulations/` lie beside this folder; the build puts
# them inside it. Both layouts import as `flower_vfl.strategies`.
_CLONE = Path(__file__).resolve().parent.parent
if (
    not (Path(__file__).parent / "strategies").exists()
    and (_CLONE / "strategies" / "vertical.py").exists()
):
    __path__.append(str(_CLONE))

# Loaded when first used: they import more than a party needs.
_LAZY = {
    "Leakage": "flower_vfl.leakage.monitor",
    "ResidentGrid": "flower_vfl.grids.resident",
    "VerticalStrategy": "flower_vfl.strategies",
    "defended_grid": "flower_vfl.strategies",
    "defense_mod": "flower_vfl.strategies",
    "resident": "flower_vfl.grids.resident",
}

__all__ = [
    "Batch",
    "ConfigError",
    "CrossEntropy",
    "GradientTransform",
    "Imputation",
    "InProcessGrid",
    "LabelParty",
    "LabelPrivacy",
    "Leakage",
    "MeanSquaredError",
    "NodePolicy",
    "Noise",
    "Objective",
    "PartyError",
    "PartyRestartedError",
    "PassiveParty",
    "ResidentGrid",
    "VerticalError",
    "VerticalStrategy",
    "defended_grid",
    "defense_mod",
    "in_process",
    "resident",
    "vertical_client_app",
]


def __getattr__(name: str) -> Any:
    """Return a public name that is loaded when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flower_vfl' has no attribute '{name}'")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
