"""Objectives: what the label party optimises."""

from .base import (
    Objective,
    OptimizerFactory,
    Outcome,
    Task,
    TopModelObjective,
    clear_gradients,
)
from .coae import CoAE
from .cross_entropy import CrossEntropy
from .dcor import DistanceCorrelation
from .gafm import GAFM
from .gafm_original import GAFMOriginal
from .ladistill import KDk, LADistill, train_teacher
from .mean_squared_error import MeanSquaredError
from .mid import MID
from .selection import (
    DeltaChoice,
    GammaChoice,
    SubsetTraining,
    select_delta,
    select_gamma,
)

__all__ = [
    "GAFM",
    "MID",
    "CoAE",
    "CrossEntropy",
    "DeltaChoice",
    "DistanceCorrelation",
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
