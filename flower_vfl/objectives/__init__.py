"""What the label party optimises."""

from .base import (
    Objective,
    OptimizerFactory,
    Outcome,
    Task,
    TopModelObjective,
    clear_gradients,
)
from .cross_entropy import CrossEntropy
from .gafm import GAFM
from .gafm_original import GAFMOriginal
from .ladistill import KDk, LADistill
from .mean_squared_error import MeanSquaredError
from .selection import (
    DeltaChoice,
    GammaChoice,
    Rehearsal,
    Trial,
    rehearse,
    select_delta,
    select_gamma,
)
from .teacher import train_teacher

__all__ = [
    "GAFM",
    "CrossEntropy",
    "DeltaChoice",
    "GAFMOriginal",
    "GammaChoice",
    "KDk",
    "LADistill",
    "MeanSquaredError",
    "Objective",
    "OptimizerFactory",
    "Outcome",
    "Rehearsal",
    "Task",
    "TopModelObjective",
    "Trial",
    "clear_gradients",
    "rehearse",
    "select_delta",
    "select_gamma",
    "train_teacher",
]
