"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flower_vfl.objectives import OptimizerFactory
from flower_vfl.specs import build_from_spec


def adam(lr: float = 1e-3, weight_decay: float = 0.0) -> OptimizerFactory:
    """Return a factory of Adam."""
    return partial(torch.optim.Adam, lr=lr, weight_decay=weight_decay)


def adamw(lr: float = 1e-3, weight_decay: float = 0.01) -> OptimizerFactory:
    """Return a factory of AdamW."""
    return partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay)


def sgd(
    lr: float = 0.01,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> OptimizerFactory:
    """Return a factory of SGD."""
    return partial(
        torch.optim.SGD,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )


OPTIMIZERS: dict[str, Callable[..., OptimizerFactory]] = {
    "adam": adam,
    "adamw": adamw,
    "sgd": sgd,
}


def build_optimizer(text: str) -> OptimizerFactory:
    """Return an optimizer factory for a config string."""
    return build_from_spec("optimizer", text, OPTIMIZERS)
