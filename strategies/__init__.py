"""Strategies, gradient transforms, and adapters for apps that others wrote."""

from flower_vfl.rows import AdjustableTransform, RowTransform

from .adapters.defended_grid import defended_grid
from .adapters.defense_mod import defense_mod
from .alignment import Alignment
from .checkpoints import Checkpoints
from .defenses.baselines import (
    GradientCompression,
    Iso,
    MaxNorm,
    MultiBucket,
    NoisyGradients,
)
from .defenses.compose import Compose, NoDefense, PerParty, Scheduled
from .defenses.geno import Geno
from .defenses.marvell.solver import MarvellSolution, solve_marvell
from .defenses.marvell.transform import Marvell
from .defenses.ppdl import PPDL
from .defenses.registry import (
    DEFENSES,
    PLACEMENTS,
    Defense,
    Placement,
    build_defense,
    defense_spec,
)
from .defenses.sgsub import FLSG, SGSub
from .state import VerticalResult
from .stopping import EarlyStopping
from .tracking import TRACKERS, Mlflow, TensorBoard, Tracker, build_tracker
from .vertical import VerticalStrategy

__all__ = [
    "DEFENSES",
    "FLSG",
    "PLACEMENTS",
    "PPDL",
    "TRACKERS",
    "AdjustableTransform",
    "Alignment",
    "Checkpoints",
    "Compose",
    "Defense",
    "EarlyStopping",
    "Geno",
    "GradientCompression",
    "Iso",
    "Marvell",
    "MarvellSolution",
    "MaxNorm",
    "Mlflow",
    "MultiBucket",
    "NoDefense",
    "NoisyGradients",
    "PerParty",
    "Placement",
    "RowTransform",
    "SGSub",
    "Scheduled",
    "TensorBoard",
    "Tracker",
    "VerticalResult",
    "VerticalStrategy",
    "build_defense",
    "build_tracker",
    "defended_grid",
    "defense_mod",
    "defense_spec",
    "solve_marvell",
]
