"""Gradients with classes, and what Marvell makes of them, for its tests."""

from __future__ import annotations

import torch
from torch import Tensor

from flower_vfl.strategies.defenses.marvell.transform import Marvell
from flower_vfl.transform import Batch


def batch_of(labels: Tensor | None, step: int = 1, party: str = "p1") -> Batch:
    return Batch(party=party, step=step, seed=7, labels=labels)


def gradient(
    rows: int = 200, d: int = 6, positive: float = 0.3, classes: int = 2
) -> tuple[Tensor, Tensor]:
    """Return rows whose classes differ in mean and in variance, and their labels."""
    stream = torch.Generator().manual_seed(3)
    if classes == 2:
        labels = (torch.rand(rows, generator=stream) < positive).long()
    else:
        labels = torch.arange(rows) % classes
    means = torch.randn(classes, d, generator=stream)
    spread = torch.linspace(0.5, 1.0, classes)[labels].unsqueeze(1)
    return torch.randn(rows, d, generator=stream) * spread + means[labels], labels


def changed(defense: Marvell, rows: Tensor, batch: Batch) -> Tensor:
    result = defense(rows, batch)
    assert result is not None
    return result
