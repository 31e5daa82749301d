"""Grids: how messages travel between the strategy and the parties."""
