"""Objectives: what the label party optimises."""

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
from .ladistill import KDk, LADistill, train_teacher
from .mean_squared_error import MeanSquaredError
from .selection import (
    DeltaChoice,
    GammaChoice,
    SubsetTraining,
    select_delta,
    select_gamma,
)

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
    "SubsetTraining",
    "Task",
    "TopModelObjective",
    "clear_gradients",
    "select_delta",
    "select_gamma",
    "train_teacher",
]
