"""Strategies, gradient transforms, and adapters for apps that others wrote."""

from flower_vfl.parties.local_updates import LocalUpdates
from flower_vfl.protocol.codecs import CODECS, Compression
from flower_vfl.rows import AdjustableTransform, RowTransform
from flower_vfl.strategies.adapters.defended_grid import defended_grid
from flower_vfl.strategies.adapters.defense_mod import defense_mod
from flower_vfl.strategies.adapters.recording import record_grid, record_mod
from flower_vfl.strategies.defenses.compose import (
    Compose,
    NoDefense,
    PerParty,
    Scheduled,
)
from flower_vfl.strategies.defenses.geno import Geno
from flower_vfl.strategies.defenses.gradient_compression import GradientCompression
from flower_vfl.strategies.defenses.iso import Iso
from flower_vfl.strategies.defenses.marvell.solver import MarvellSolution, solve_marvell
from flower_vfl.strategies.defenses.marvell.transform import Marvell
from flower_vfl.strategies.defenses.max_norm import MaxNorm
from flower_vfl.strategies.defenses.multi_bucket import MultiBucket
from flower_vfl.strategies.defenses.noisy_gradients import NoisyGradients
from flower_vfl.strategies.defenses.ppdl import PPDL
from flower_vfl.strategies.defenses.registry import (
    DEFENSES,
    PLACEMENTS,
    Defense,
    Placement,
    build_defense,
    defense_spec,
)
from flower_vfl.strategies.defenses.sgsub import FLSG, SGSub

from .alignment import Alignment
from .checkpoints import Checkpoints
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
