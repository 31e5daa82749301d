"""How a run is evaluated and stopped, the loss that it takes, and what it predicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO
from typing import TYPE_CHECKING, cast

from flwr.app import Array, ArrayRecord
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyError, check_name, require
from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.parties.checkpoints import step_tag
from flower_vfl.parties.schedule import count_batches
from flower_vfl.protocol.config import Value
from flower_vfl.protocol.messages import Content, Verb

from .checkpoints import Checkpoints
from .progress import TrainingProgress
from .state import RunState, split_metrics

if TYPE_CHECKING:
    from .training import Training

LOWER_IS_BETTER = ("loss", "rmse", "ace")


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when a validation metric has not improved for some evaluations.

    Parameters
    ----------
    patience : int (default: 5)
        Evaluations without improvement after which training stops.
    metric : str | None (default: None)
        ``"auc"``, ``"accuracy"``, ``"pearson"``, ``"loss"``, ...; None uses the main
        metric of the task.
    min_delta : float (default: 0.0)
        Smallest change that counts as an improvement.
    restore_best : bool (default: True)
        Whether all parties restore their weights of the best epoch at the end.

    Examples
    --------
    >>> from flower_vfl.strategies import EarlyStopping, VerticalStrategy
    >>> stopping = EarlyStopping(patience=3, metric="loss")
    >>> strategy = VerticalStrategy(valid_fraction=0.2, early_stopping=stopping)
    >>> stopping.improves(0.6, best=0.7, metric="loss")
    True
    """

    patience: int = 5
    metric: str | None = None
    min_delta: float = 0.0
    restore_best: bool = True

    def __post_init__(self) -> None:
        require(self.patience >= 1, "patience", "at least 1", self.patience)

    def improves(self, value: float, best: float | None, metric: str) -> bool:
        """Return whether a value is better than the best so far."""
        if best is None:
            return True
        gain = best - value if metric in LOWER_IS_BETTER else value - best
        return gain > self.min_delta

    def judge(self, state: RunState, metrics: Mapping[str, float], main: str) -> bool:
        """Update a run's state after an evaluation; return whether it is the best."""
        metric = self.metric or main
        name = f"valid_{metric}"
        if name not in metrics:
            raise ConfigError(
                f"early stopping needs '{name}', got {', '.join(metrics) or 'none'}; "
                "set valid_fraction, another metric, or the label's report-metrics"
            )
        if self.improves(metrics[name], state.best, metric):
            state.best, state.stale = metrics[name], 0
            return True
        state.stale += 1
        if state.stale >= self.patience:
            state.stopped, state.reason = True, f"{name} no longer improved"
        return False


def evaluate_epoch(
    training: Training, epoch: int, bar: TrainingProgress, last: bool
) -> None:
    """Evaluate the held-out rows after an epoch, and judge whether to stop early."""
    held_out = [s for s in ("valid", "test") if training.participants.sizes[s]]
    conclude = partial(_conclude, training, epoch, training.state.step, bar)
    pipeline = training.pipeline
    if pipeline is not None and not last and pipeline.evaluates_ahead(held_out):
        pipeline.evaluate(held_out, conclude)
    else:
        conclude({split: evaluate(training, split) for split in held_out})


def _conclude(
    training: Training,
    epoch: int,
    step: int,
    bar: TrainingProgress,
    found: dict[str, dict[str, float]],
) -> None:
    """Keep the metrics of an epoch, show them, and judge whether to stop."""
    state, stopping = training.state, training.strategy.early_stopping
    state.evaluate[epoch] = found
    metrics = split_metrics(found)
    asked = training.evaluate_fn
    if asked is not None and (told := asked(epoch, ArrayRecord())) is not None:
        state.server[epoch] = dict(told)
    training.trackers.tell("epoch", epoch, step, metrics)
    main = MAIN_METRIC[training.participants.label.task]
    shown = (stopping.metric if stopping is not None else None) or main
    name = f"{next(iter(found), '')}_{shown}"
    if name in metrics:
        bar.evaluated(name, metrics[name])
    known = {"loss": state.train[epoch].get("loss", math.nan), **metrics}
    listed = ", ".join(f"{k} {v:.4f}" for k, v in known.items())
    log(INFO, "epoch %d: %s", epoch, listed)
    if stopping is not None:
        best = stopping.judge(state, metrics, main)
        if best and stopping.restore_best:
            state.best_tag = f"best-{state.step}"
            training.checkpoint(state.best_tag)


def evaluate(training: Training, split: str) -> dict[str, float]:
    """Return the metrics of ``"train"``, ``"valid"`` or ``"test"``."""
    metrics: dict[str, float] = {}
    for reply in ask_about(training, Verb.EVALUATE, split):
        metrics = reply.metrics or metrics
    return metrics


def ask_about(training: Training, verb: Verb, split: str) -> Iterable[Content]:
    """Have a split embedded, part by part, and ask the label party about it."""
    participants, messenger = training.participants, training.messenger
    check_name("split", split, participants.sizes)
    if training.pipeline is not None:
        training.pipeline.settle()
    rows, label = participants.sizes[split], participants.label.name
    size, step = training.strategy.evaluation_rows, training.state.step
    for index in range(count_batches(rows, size or max(rows, 1))):
        requests = training.requests(config={"split": split}, index=index)
        replies = messenger.ask(Verb.EMBED, requests, step)
        embeddings = training.embeddings(replies, step)
        asked = Content({"split": split}, embeddings, index=index)
        yield messenger.ask(verb, {label: asked}, step)[label]


def serve(training: Training, party: str, hide: int) -> None:
    """Have the label party answer what a passive party asks."""
    messenger, participants = training.messenger, training.participants
    passive, label = participants.passive, participants.label
    check_name("passive party", party, passive)
    if not hide and (len(passive) > 1 or label.shape):
        remedy = "hide the row in a batch, for example with hide=100"
        raise ConfigError(f"other parties have features of the same rows: {remedy}")

    def ask(name: str, content: Content) -> Content:
        return messenger.ask(Verb.SERVE, {name: content})[name]

    def predict(embeddings: Mapping[str, Array], number: int) -> Array:
        config: dict[str, Value] = {"stage": "predict", "batch": number, "hide": hide}
        config["party"] = party  # whom the predictions are for
        return ask(label.name, Content(config, embeddings)).arrays["predictions"]

    asked = ask(party, Content({"stage": "ask", "hide": hide}))
    found: dict[str, Array] = {}
    if hide:
        for number in cast(list[int], asked.config["batches"]):
            where: dict[str, Value] = {"stage": "embed", "batch": number, "hide": hide}
            requests = {name: Content(dict(where)) for name in passive}
            replies = messenger.ask(Verb.SERVE, requests)
            embeddings = {name: reply.arrays[name] for name, reply in replies.items()}
            found[str(number)] = predict(embeddings, number)
    elif asked.arrays:
        found["predictions"] = predict(asked.arrays, 0)
    ask(party, Content({"stage": "tell", "hide": hide}, found))


def choose_label_loss(training: Training) -> None:
    """Train with every loss that the label party offers, and begin with the best.

    Validation labels are randomised too, so that the choice reveals nothing more.
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
    given = training.messenger, training.participants, training.epochs
    state = type(training)(strategy, *given).run()
    measured = (each["valid"] for each in state.evaluate.values())
    values = [each[metric] for each in measured if metric in each]
    if not values:
        problem = "chooses a loss by validation rows but does not report their metrics"
        remedy = "Name a loss there: label-dp with loss=forward, or report its metrics"
        raise PartyError(label.name, problem, remedy)
    return values
