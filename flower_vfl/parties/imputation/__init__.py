"""Training on the union of all parties' rows: stand-ins for what a party lacks."""

from .calibration import Calibration
from .features import FEATURE_STAND_INS, FeatureFill, build_feature_fill
from .labels import LABEL_STAND_INS, LabelFill, build_label_fill

__all__ = [
    "FEATURE_STAND_INS",
    "LABEL_STAND_INS",
    "Calibration",
    "FeatureFill",
    "LabelFill",
    "build_feature_fill",
    "build_label_fill",
]
