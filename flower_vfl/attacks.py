"""The attacks and how their success is measured, under the name that users expect."""

from flower_vfl.leakage.attacks import *  # noqa: F403
from flower_vfl.leakage.attacks import __all__ as __all__
