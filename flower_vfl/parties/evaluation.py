"""Predictions of a split that arrive in parts, and what they are worth."""

import torch
from torch import Tensor

from flower_vfl.errors import PartyError
from flower_vfl.metrics import METRICS
from flower_vfl.objectives import Task


class Evaluation:
    """Collects the predictions of one split."""

    def __init__(self, scores: list[Tensor] | None = None) -> None:
        self.scores = scores or []

    def add(self, index: int, predictions: Tensor) -> None:
        """Take in one part; the first one begins anew."""
        earlier = self.scores if index else []
        self.scores = [*earlier, predictions.cpu()]

    def finish(
        self, parts: int, labels: Tensor, labelled: Tensor | None, task: Task, name: str
    ) -> dict[str, float]:
        """Return the metrics of all parts, over the rows that have a label."""
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
