"""Parties: who holds features, who holds labels, and what each does with a batch."""
