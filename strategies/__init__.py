"""Strategies and gradient transforms."""
