"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flower_vfl.objectives import OptimizerFactory
from flower_vfl.spec import build_from_spec


def adam(lr: float = 1e-3, weight_decay: float = 0.0) -> OptimizerFactory:
    """Return a factory of Adam.

    Parameters
    ----------
    lr : float (default: 1e-3)
        Learning rate.
    weight_decay : float (default: 0.0)
        L2 penalty.
    """
    return partial(torch.optim.Adam, lr=lr, weight_decay=weight_decay)


def adamw(lr: float = 1e-3, weight_decay: float = 0.01) -> OptimizerFactory:
    """Return a factory of AdamW.

    Parameters
    ----------
    lr : float (default: 1e-3)
        Learning rate.
    weight_decay : float (default: 0.01)
        Decoupled weight decay.
    """
    return partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay)


def sgd(
    lr: float = 0.01,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> OptimizerFactory:
    """Return a factory of SGD.

    Parameters
    ----------
    lr : float (default: 0.01)
        Learning rate.
    momentum : float (default: 0.0)
        Momentum.
    weight_decay : float (default: 0.0)
        L2 penalty.
    nesterov : bool (default: False)
        Whether the momentum is Nesterov's.
    """
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
    """Return an optimizer factory for a config string.

    Parameters
    ----------
    text : str
        For example ``"adam:lr=0.003"``.
    """
    return build_from_spec("optimizer", text, OPTIMIZERS)
