"""Training on the union of all parties' rows: stand-ins for what a party lacks."""

from .calibration import Calibration
from .features import FEATURE_STAND_INS, FeatureStandIn, build_feature_stand_in
from .labels import LABEL_STAND_INS, LabelStandIn, build_label_stand_in

__all__ = [
    "FEATURE_STAND_INS",
    "LABEL_STAND_INS",
    "Calibration",
    "FeatureStandIn",
    "LabelStandIn",
    "build_feature_stand_in",
    "build_label_stand_in",
]
