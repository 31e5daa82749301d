"""Strategies, gradient transforms, and adapters for apps that others wrote."""

from flower_vfl.parties.local_updates import LocalUpdates
from flower_vfl.protocol.codecs import CODECS, Compression
from flower_vfl.rows import AdjustableTransform, RowTransform

from .adapters.defended_grid import defended_grid
from .adapters.defense_mod import defense_mod
from .adapters.recording import record_grid, record_mod
from .alignment import Alignment
from .checkpoints import Checkpoints
from .defenses.compose import Compose, NoDefense, PerParty, Scheduled
from .defenses.geno import Geno
from .defenses.gradient_compression import GradientCompression
from .defenses.iso import Iso
from .defenses.marvell.solver import MarvellSolution, solve_marvell
from .defenses.marvell.transform import Marvell
from .defenses.max_norm import MaxNorm
from .defenses.multi_bucket import MultiBucket
from .defenses.noisy_gradients import NoisyGradients
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
from .evaluation import EarlyStopping
from .fitting import fit
from .state import VerticalResult
from .tracking import TRACKERS, Mlflow, TensorBoard, Tracker, build_tracker
from .vertical import VerticalStrategy

__all__ = [
    "CODECS",
    "DEFENSES",
    "FLSG",
    "PLACEMENTS",
    "PPDL",
    "TRACKERS",
    "AdjustableTransform",
    "Alignment",
    "Checkpoints",
    "Compose",
    "Compression",
    "Defense",
    "EarlyStopping",
    "Geno",
    "GradientCompression",
    "Iso",
    "LocalUpdates",
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
    "fit",
    "record_grid",
    "record_mod",
    "solve_marvell",
]
