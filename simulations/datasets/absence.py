"""Rows that simulated parties lack, as in the experiments of FLORIST."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from flower_vfl.parties.base import Party
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.randomness import derive_seed
from flower_vfl.simulations.config import RunConfig
from flower_vfl.strategies.alignment import NONE


def absent_rows(
    config: RunConfig, codes: NDArray[np.int8], index: int
) -> NDArray[np.bool_] | None:
    """Return which training rows a party lacks; None if it lacks none."""
    share = config.absent_features if index else config.absent_labels
    if not share:
        return None
    training = np.flatnonzero(codes == TRAIN)
    stream = np.random.default_rng(derive_seed(config.seed, "absent", index))
    # One permutation for all shares: a larger share contains a smaller one.
    chosen = stream.permutation(training)[: round(share * len(training))]
    absent = np.zeros(len(codes), dtype=bool)
    absent[chosen] = True
    return absent


def place(config: RunConfig, party: Party, absent: NDArray[np.bool_] | None) -> None:
    """Give a party all rows of the run, marking those that it lacks."""
    if not config.absent_features and not config.absent_labels:
        return
    if config.alignment != NONE:  # the alignment places the party
        return
    shares = {
        f"passive-{i + 1}": 1.0 - config.absent_features for i in range(config.parties)
    }
    shares["label"] = 1.0 - config.absent_labels
    local = torch.arange(party.own_rows)
    if absent is not None:
        local[torch.from_numpy(absent)] = -1
    party.place(RowIndex(local, shares))
