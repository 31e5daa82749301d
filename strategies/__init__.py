"""Strategies, gradient transforms, and adapters for apps that others wrote."""

from .base import Defense, StrongDefense
from .compose import Compose, PerParty, Scheduled
from .defended_grid import defended_grid
from .defense_mod import defense_mod
from .defenses import DEFENSES, build_defense, defense_spec
from .flsg import FLSG
from .geno import Geno
from .gradient_compression import GradientCompression
from .iso import Iso
from .marvell import Marvell
from .marvell_solver import MarvellSolution, solve_marvell
from .max_norm import MaxNorm
from .multi_bucket import MultiBucket
from .no_defense import NoDefense
from .noisy_gradients import NoisyGradients
from .ppdl import PPDL
from .run_state import VerticalResult
from .serving import serve
from .sgsub import SGSub
from .stopping import EarlyStopping
from .tracking import TRACKERS, Mlflow, TensorBoard, Tracker, build_tracker
from .vertical import PLACEMENTS, Placement, VerticalStrategy

__all__ = [
    "DEFENSES",
    "FLSG",
    "PLACEMENTS",
    "PPDL",
    "TRACKERS",
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
    "SGSub",
    "Scheduled",
    "StrongDefense",
    "TensorBoard",
    "Tracker",
    "VerticalResult",
    "VerticalStrategy",
    "build_defense",
    "build_tracker",
    "defended_grid",
    "defense_mod",
    "defense_spec",
    "serve",
    "solve_marvell",
]
