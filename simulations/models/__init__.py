"""Bottom models (features to cut layer) and top models (cut layers to logits)."""

from .cnn import CNN
from .layers import ACTIVATIONS, BottomModel
from .mlp import MLP, WideDeep
from .registry import BOTTOM_MODELS, TOP_MODELS, build_bottom, build_top
from .resnet import ResNet20
from .top import MLPTop

__all__ = [
    "ACTIVATIONS",
    "BOTTOM_MODELS",
    "CNN",
    "MLP",
    "TOP_MODELS",
    "BottomModel",
    "MLPTop",
    "ResNet20",
    "WideDeep",
    "build_bottom",
    "build_top",
]
