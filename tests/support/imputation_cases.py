"""Runs of aligned parties that lack some of the rows, for several tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from strategy_cases import build_strategy
from vertical_cases import ROWS, bottom, features, make_label

from flower_vfl import InProcessGrid, LabelParty, PassiveParty, vertical_client_app
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.strategies import VerticalResult, VerticalStrategy

UNION = 80  # rows of all parties together, some of them nobody's
SHARES = {"label": 0.75, "passive-1": 0.75, "passive-2": 0.75}


def row_index(number: int, held: int = ROWS) -> RowIndex:
    """Return which of the aligned rows a party holds: the first of its own, mixed."""
    stream = np.random.default_rng(number)
    local = np.full(UNION, -1)
    local[stream.permutation(UNION)[:held]] = stream.permutation(ROWS)[:held]
    return RowIndex(torch.from_numpy(local), SHARES)


def placed_app(
    label: dict[str, Any] | None = None, passive: dict[str, Any] | None = None
) -> ClientApp:
    """Return an app whose parties have been aligned, with dropout and batch norm."""

    def make(context: Context) -> PassiveParty:
        number = int(context.node_config["partition-id"])
        options = {"secret": 7, **(passive or {})}
        party = PassiveParty(features(number), bottom(), device="cpu", **options)
        party.place(row_index(number))
        return party

    def active(context: Context) -> LabelParty:
        party = make_label(context, **{"secret": 7, **(label or {})})
        party.place(row_index(0))
        return party

    return vertical_client_app(make, active)


def strategy(**options: Any) -> VerticalStrategy:
    settings = {"batch_size": 16, "seed": 3, "keep_final": True, "threads": 1}
    return build_strategy(**{**settings, "progress": False, **options})


def start(app: ClientApp, folder: Path, **options: Any) -> VerticalResult:
    with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
        return strategy(**options).start(grid, num_rounds=2)
