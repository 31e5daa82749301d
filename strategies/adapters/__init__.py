"""Gradient transforms in Flower apps that others wrote."""
