"""Vertical federated learning on Flower."""
