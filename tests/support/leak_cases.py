"""Runs whose leakage is measured, and everything that their messages carried."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from strategy_cases import build_strategy
from torch import Tensor, nn
from vertical_cases import ADAM, COLUMNS, WIDTH, HookedGrid, features, simple_parties

from flower_vfl import LabelParty, PassiveParty
from flower_vfl.grids.in_process import in_process
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.objectives import CrossEntropy, MeanSquaredError
from flower_vfl.parties.base import Party
from flower_vfl.protocol.messages import Content, Verb, read
from flower_vfl.strategies import VerticalResult, build_defense

NOISE = 12345


@contextmanager
def flower_warnings() -> Iterator[list[str]]:
    """Collect what Flower's log, which pytest does not see, warns of."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("flwr"), Collect(level=logging.WARNING)
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Record:
    """What travelled between the strategy and the parties of one run."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Content]] = []
        self.replies: list[tuple[str, Content]] = []

    def grid(self, inner: Any) -> HookedGrid:
        """Return a grid that writes down every message of another one."""

        def before(message: Message) -> None:
            self.sent.append((message.metadata.message_type, read(message)))

        def after(reply: Message) -> Message:
            self.replies.append((reply.metadata.message_type, read(reply)))
            return reply

        return HookedGrid(inner, before, after)

    def label_replies(self) -> list[Content]:
        """Return the label party's reply of every step."""
        return [c for verb, c in self.replies if verb == Verb.TRAIN_STEP]


def run(
    leakage: Leakage | None,
    transforms: Any = "",
    placement: Any = "strategy",
    epochs: int = 2,
    parties: list[Party] | None = None,
    record: Record | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> VerticalResult:
    """Train two linear parties, or those given; options are the label party's."""
    if parties is None:
        given = {"trust_server": True, "build_defense": build_defense}
        label, passive = simple_parties(**{**given, **options})
        parties = [label, *passive]
    strategy = build_strategy(
        **{
            "batch_size": 16,
            "transforms": transforms,
            "placement": placement,
            "noise_seed": NOISE,
            "leakage": leakage,
            "progress": False,
            **(settings or {}),
        }
    )
    with in_process(parties) as inner:
        grid = inner if record is None else record.grid(inner)
        return strategy.start(grid, num_rounds=epochs)


def deep_parties(
    labels: Tensor, task: str = "binary", passive: int = 2, **options: Any
) -> list[Party]:
    """Return parties with hidden layers, so that gradients are not all parallel."""
    torch.manual_seed(0)
    classes = int(labels.max()) + 1 if task != "regression" else 1
    outputs = classes if task == "multiclass" else 1
    top = nn.Sequential(nn.Linear(WIDTH * passive, 8), nn.ReLU(), nn.Linear(8, outputs))
    objective = (
        MeanSquaredError(top) if task == "regression" else CrossEntropy(top, classes)
    )
    given = {"trust_server": True, "build_defense": build_defense, **options}
    others = [
        PassiveParty(
            features(i + 1, len(labels)),
            nn.Sequential(nn.Linear(COLUMNS, 6), nn.ReLU(), nn.Linear(6, WIDTH)),
            device="cpu",
            optimizer=ADAM,
        )
        for i in range(passive)
    ]
    label = LabelParty(labels, objective, optimizer=ADAM, device="cpu", **given)
    return [label, *others]


def batches_of(parties: list[Party], epochs: int) -> list[NDArray[Any]]:
    """Return the labels of the batch of every step of a run that has ended."""
    label = parties[0]
    assert isinstance(label, LabelParty) and label.raw_labels is not None
    schedule = label.configured()
    steps = -(-schedule.size("train") // 16)
    return [
        label.raw_labels[schedule.training_batches(epoch)[index]].numpy()
        for epoch in range(1, epochs + 1)
        for index in range(steps)
    ]


def norm_auc(gradient: Tensor, labels: NDArray[Any]) -> float:
    """Return the leak AUC of the norm attack."""
    rows = gradient.double().flatten(1).numpy()
    return float(roc_auc_score(labels, np.linalg.norm(rows, axis=1)))


def mean_auc(gradient: Tensor, labels: NDArray[Any]) -> float:
    """Return the leak AUC of the mean attack."""
    rows = gradient.double().flatten(1).numpy()
    far, near = (
        np.linalg.norm(rows - rows[labels == c].mean(axis=0), axis=1) for c in (0, 1)
    )
    return float(roc_auc_score(labels, far - near))
