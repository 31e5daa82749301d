"""Predictions of a split that arrive in parts, and what they are worth."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import PartyError
from .metrics import METRICS
from .objectives import Task


class Evaluation:
    """Collects the predictions of one split.

    Parameters
    ----------
    scores : list[Tensor] | None (default: None)
        Parts that have arrived already.
    """

    def __init__(self, scores: list[Tensor] | None = None) -> None:
        self.scores = scores or []

    def add(self, index: int, predictions: Tensor) -> None:
        """Take in one part; the first one begins anew.

        Parameters
        ----------
        index : int
            The part, from 0.
        predictions : Tensor
            Its predictions.
        """
        earlier = self.scores if index else []
        self.scores = [*earlier, predictions.cpu()]

    def finish(
        self, parts: int, labels: Tensor, labelled: Tensor | None, task: Task, name: str
    ) -> dict[str, float]:
        """Return the metrics of all parts, over the rows that have a label.

        Parameters
        ----------
        parts : int
            How many there should be.
        labels : Tensor
            The labels that are known, in order.
        labelled : Tensor | None
            Which rows have one; None for all.
        task : {"binary", "multiclass", "regression"}
            What the labels are.
        name : str
            The label party's name, for the error.
        """
        if len(self.scores) != parts:
            raise PartyError(
                name,
                f"cannot evaluate: {len(self.scores)} of {parts} parts arrived",
                "Evaluate again from the first part, at a party that has labels",
            )
        scores, self.scores = torch.cat(self.scores), []
        if labelled is not None:
            scores = scores[labelled]
        if not len(scores):  # none of the split's rows has a label
            return {}
        return METRICS[task](scores.double().numpy(), labels.double().numpy())
