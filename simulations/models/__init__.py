"""Bottom models (features to cut layer) and top models (cut layers to logits)."""

from .bottom import BottomModel
from .cnn import CNN
from .layers import ACTIVATIONS
from .mlp import MLP
from .registry import BOTTOM_MODELS, TOP_MODELS, auto_bottom, build_bottom, build_top
from .resnet import ResNet20
from .top import CNNTop, IdentityTop, LinearTop, MLPTop, TopModel
from .wide_deep import WideDeep

__all__ = [
    "ACTIVATIONS",
    "BOTTOM_MODELS",
    "CNN",
    "MLP",
    "TOP_MODELS",
    "BottomModel",
    "CNNTop",
    "IdentityTop",
    "LinearTop",
    "MLPTop",
    "ResNet20",
    "TopModel",
    "WideDeep",
    "auto_bottom",
    "build_bottom",
    "build_top",
]
