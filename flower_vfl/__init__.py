"""Vertical federated learning on Flower."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, PartyError, PartyRestartedError, VerticalError

if TYPE_CHECKING:
    from flower_vfl.grids.in_process import InProcessGrid, in_process
    from flower_vfl.grids.resident import ResidentGrid, resident
    from flower_vfl.leakage.monitor import Leakage
    from flower_vfl.leakage.recording import Recorder
    from flower_vfl.objectives import CrossEntropy, MeanSquaredError, Objective
    from flower_vfl.parties.imputation.row_index import Imputation
    from flower_vfl.parties.label import LabelParty
    from flower_vfl.parties.passive import PassiveParty
    from flower_vfl.parties.policies import NodePolicy
    from flower_vfl.privacy import LabelPrivacy
    from flower_vfl.protocol.client_app import vertical_client_app
    from flower_vfl.randomness import Noise
    from flower_vfl.simulations.estimators import VerticalClassifier, VerticalRegressor
    from flower_vfl.strategies import (
        VerticalStrategy,
        defended_grid,
        defense_mod,
        fit,
        record_grid,
        record_mod,
    )
    from flower_vfl.transform import Batch, GradientTransform

# In a clone, `strategies/` and `simulations/` lie beside this folder; the build puts
# them inside it. Both layouts import as `flower_vfl.strategies`.
_CLONE = Path(__file__).resolve().parent.parent
if (
    not (Path(__file__).parent / "strategies").exists()
    and (_CLONE / "strategies" / "vertical.py").exists()
):
    __path__.append(str(_CLONE))

# By module, names that are loaded when first used: `flower-vfl --help` needs no torch,
# and a party no strategy.
_LAZY = {
    "grids.in_process": ("InProcessGrid", "in_process"),
    "grids.resident": ("ResidentGrid", "resident"),
    "leakage.monitor": ("Leakage",),
    "leakage.recording": ("Recorder",),
    "objectives": ("CrossEntropy", "MeanSquaredError", "Objective"),
    "parties.imputation.row_index": ("Imputation",),
    "parties.label": ("LabelParty",),
    "parties.passive": ("PassiveParty",),
    "parties.policies": ("NodePolicy",),
    "privacy": ("LabelPrivacy",),
    "protocol.client_app": ("vertical_client_app",),
    "randomness": ("Noise",),
    "simulations.estimators": ("VerticalClassifier", "VerticalRegressor"),
    "strategies": ("VerticalStrategy", "fit"),
    "strategies.adapters.defended_grid": ("defended_grid",),
    "strategies.adapters.defense_mod": ("defense_mod",),
    "strategies.adapters.recording": ("record_grid", "record_mod"),
    "transform": ("Batch", "GradientTransform"),
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
    "Recorder",
    "ResidentGrid",
    "VerticalClassifier",
    "VerticalError",
    "VerticalRegressor",
    "VerticalStrategy",
    "defended_grid",
    "defense_mod",
    "fit",
    "in_process",
    "record_grid",
    "record_mod",
    "resident",
    "vertical_client_app",
]


def __getattr__(name: str) -> Any:
    """Return a public name that is loaded when it is first used."""
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"flower_vfl.{module}"), name)
    raise AttributeError(f"module 'flower_vfl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
