"""Datasets, models, the command line and Flower apps."""
