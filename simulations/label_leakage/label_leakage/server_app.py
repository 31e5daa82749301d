"""The ServerApp with the strategy; its code is in ``flower_vfl.simulations.app``."""

from flower_vfl.simulations.app import server_app as app

__all__ = ["app"]
