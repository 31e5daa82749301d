"""Bottom models (features to cut layer) and top models (cut layers to logits)."""

from .bottom import ACTIVATIONS, CNN, MLP, BottomModel, ResNet20, WideDeep
from .registry import BOTTOM_MODELS, TOP_MODELS, build_bottom, build_top

__all__ = [
    "ACTIVATIONS",
    "BOTTOM_MODELS",
    "CNN",
    "MLP",
    "TOP_MODELS",
    "BottomModel",
    "ResNet20",
    "WideDeep",
    "build_bottom",
    "build_top",
]
