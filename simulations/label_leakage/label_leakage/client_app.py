"""The ClientApp of every party; its code is in ``flower_vfl.simulations.app``."""

from flower_vfl.simulations.app import client_app as app

__all__ = ["app"]
