"""Runs of aligned parties that lack some of the rows, for several tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from vertical_cases import ROWS, bottom, features, make_label

from flower_vfl import (
    Imputation,
    InProcessGrid,
    LabelParty,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.parties.imputation import RowIndex
from flower_vfl.strategies import Checkpoints, VerticalResult, VerticalStrategy

UNION = 80  # rows of all parties together, some of them nobody's
REPEATABLE = Imputation(secret=7)
SHARES = {"label": 0.75, "passive-1": 0.75, "passive-2": 0.75}


def row_index(number: int, held: int = ROWS) -> RowIndex:
    """Return which of the aligned rows a party holds: the first of its own, mixed."""
    stream = np.random.default_rng(number)
    local = np.full(UNION, -1)
    local[stream.permutation(UNION)[:held]] = stream.permutation(ROWS)[:held]
    return RowIndex(torch.from_numpy(local), SHARES)


def aligned_app(
    label: Imputation = REPEATABLE, passive: Imputation = REPEATABLE, **options: Any
) -> ClientApp:
    """Return an app whose parties have been aligned, with dropout and batch norm."""

    def make(context: Context) -> PassiveParty:
        number = int(context.node_config["partition-id"])
        party = PassiveParty(
            features(number), bottom(), device="cpu", imputation=passive
        )
        party.place(row_index(number))
        return party

    def active(context: Context) -> LabelParty:
        party = make_label(context, imputation=label, **options)
        party.place(row_index(0))
        return party

    return vertical_client_app(make, active)


def strategy(**options: Any) -> VerticalStrategy:
    every = options.pop("every", 0)
    return VerticalStrategy(
        **{"batch_size": 16, **options},
        seed=3,
        threads=1,
        progress=False,
        checkpoints=Checkpoints(every=every, keep_final=True),
    )


def start(app: ClientApp, folder: Path, **options: Any) -> VerticalResult:
    with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
        return strategy(**options).start(grid, num_rounds=2)
