"""Gradient transforms, one file each, and how they are named and combined."""
