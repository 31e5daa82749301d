"""What is promised about labels over a whole training, and what has been spent."""

from .accountant import Guarantee, Ledger, Release, compose
from .label_privacy import LabelPrivacy

__all__ = ["Guarantee", "LabelPrivacy", "Ledger", "Release", "compose"]
