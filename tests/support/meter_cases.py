"""Gradients that leak something, for the tests of the leakage meter."""

from __future__ import annotations

import torch
from torch import Tensor

from flower_vfl.leakage.attacks import LeakageMeter

ALL = (
    "norm",
    "cosine",
    "mean",
    "median",
    "mean:hard=true",
    "median:hard=true",
    "spectral",
)
FOUR = ALL[:4]


def case(
    rows: int = 200, width: int = 6, classes: int = 2, seed: int = 0, leak: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Return a gradient that leaks something, and its labels."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=stream)
    centers = torch.randn(classes, width, generator=stream)
    noise = torch.randn(rows, width, generator=stream)
    scale = 1.0 + 0.5 * labels.unsqueeze(1)
    return 1e-3 * (noise * scale + leak * centers[labels]), labels


def leaks_of(
    meter: LeakageMeter,
    gradient: Tensor,
    labels: Tensor,
    step: int = 1,
    clean: Tensor | None = None,
    flipped: bool = False,
) -> dict[str, float]:
    """Return what each attack finds in the gradient of a party 'a'."""
    cleans = None if clean is None else {"a": clean}
    metric = "leak_flipped" if flipped else "leak"
    found = meter.measure({"a": gradient}, labels, step, cleans)
    return {each.attack: each.value for each in found if each.metric == metric}


# Small ones are computed in double precision, wide ones in the precision they have.
SHAPES = [(101, 1), (64, 5), (300, 128)]


def scores_case(
    rows: int, width: int, classes: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return a gradient whose classes differ by a shift, and its labels."""
    stream = torch.Generator().manual_seed(rows + width + classes)
    labels = torch.arange(rows) % classes
    labels = labels[torch.randperm(rows, generator=stream)]
    noise = torch.randn(rows, width, generator=stream, dtype=torch.float64)
    centers = torch.randn(classes, width, generator=stream, dtype=torch.float64)
    return (1e-3 * (noise + centers[labels])).to(dtype), labels
