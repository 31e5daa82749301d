"""What the strategy can tell a defense about the embeddings that pass through it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import Array

from flower_vfl.arrays import to_tensor
from flower_vfl.schedule import TRAIN, Plan, Schedule
from flower_vfl.transform import Seen


class Onlooker:
    """Looks at embeddings on their way to the label party.

    Which rows a batch has follows from the shared seed. The strategy does not know the
    parties' row numbers, but can count the training rows.

    Parameters
    ----------
    rows : int
        Number of training rows.
    plan : Plan
        The settings from which every party derives its rows.
    looks : bool
        Whether any defense wants to know.
    """

    def __init__(self, rows: int, plan: Plan, looks: bool) -> None:
        codes = np.full(rows, TRAIN, np.int8)
        self._schedule = Schedule(codes, plan) if looks else None

    def look(self, parts: Mapping[str, Array], epoch: int, index: int) -> Seen | None:
        """Return the embeddings of a batch and the numbers of its rows.

        Parameters
        ----------
        parts : Mapping[str, Array]
            The embedding of each party.
        epoch : int
            The epoch, from 1.
        index : int
            The batch within the epoch, from 0.
        """
        if self._schedule is None:
            return None
        found = {name: to_tensor(part) for name, part in parts.items()}
        return Seen(found, self._schedule.training_rows(epoch, index))
