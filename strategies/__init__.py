"""Strategies and gradient transforms."""

from .stopping import EarlyStopping
from .vertical import VerticalStrategy

__all__ = ["EarlyStopping", "VerticalStrategy"]
