"""Which loss learns randomised labels best: tried before a run, on validation rows."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from logging import INFO

from flwr.supercore import log

from flower_vfl.errors import PartyError
from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.parties.checkpoints import step_tag

from .checkpoints import Checkpoints
from .evaluation import LOWER_IS_BETTER
from .training import Training


def choose_label_loss(training: Training) -> None:
    """Train with every loss that the label party offers, and begin with the best.

    Validation labels are randomised too, so that the choice reveals nothing more. All
    trainings begin with the same weights and use the same draws.
    """
    label = training.participants.label
    losses = [loss for loss in label.losses.split(",") if loss]
    if len(losses) < 2:
        return
    if not training.participants.sizes["valid"]:
        log(INFO, "no validation rows: the label party keeps its own loss")
        return
    training.checkpoint(step_tag(0))
    stopping, found = training.strategy.early_stopping, {}
    metric = (stopping.metric if stopping else None) or MAIN_METRIC[label.task]
    better = min if metric in LOWER_IS_BETTER else max
    for loss in losses:
        training.restore(step_tag(0), loss)
        values = _try(training, metric)
        found[loss] = better(values) if stopping else values[-1]
        log(INFO, "loss '%s' of private labels: %s %.4f", loss, metric, found[loss])
    training.restore(step_tag(0), better(found, key=lambda loss: found[loss]))
    training.state.label_losses = found
    # Marvell's statement is about one training, and these were several.
    training.state.sum_kl = dict.fromkeys(training.participants.passive, math.inf)


def _try(training: Training, metric: str) -> list[float]:
    """Train once, and return the metric of the validation rows after each epoch."""
    strategy = copy(training.strategy)
    strategy.checkpoints, strategy.trackers = Checkpoints(), []
    strategy.leakage, strategy.progress = None, False
    stopping, label = strategy.early_stopping, training.participants.label
    if stopping is None:
        strategy.evaluate_every = training.epochs  # the last epoch counts
    else:
        strategy.early_stopping = replace(stopping, restore_best=False)
    given = strategy, training.messenger, training.participants, training.epochs
    state = Training(*given).run()
    measured = (each["valid"] for each in state.evaluate.values())
    values = [each[metric] for each in measured if metric in each]
    if not values:
        raise PartyError(
            label.name,
            "is set to choose a loss for its private labels on validation rows, but "
            "does not report their metrics",
            "Name a loss there: label-dp with loss=forward, or report its metrics",
        )
    return values
