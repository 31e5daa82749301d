"""Vertical federated learning on Flower."""

from .client_app import vertical_client_app
from .errors import ConfigError, PartyError, PartyRestartedError, VerticalError
from .grid import InProcessGrid, in_process
from .label import LabelParty
from .objectives import CrossEntropy, MeanSquaredError, Objective
from .passive import PassiveParty
from .transform import Batch, GradientTransform

__all__ = [
    "Batch",
    "ConfigError",
    "CrossEntropy",
    "GradientTransform",
    "InProcessGrid",
    "LabelParty",
    "MeanSquaredError",
    "Objective",
    "PartyError",
    "PartyRestartedError",
    "PassiveParty",
    "VerticalError",
    "in_process",
    "vertical_client_app",
]
