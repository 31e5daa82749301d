"""What the strategy does to gradients on their way back to the passive parties."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import Array

from flower_vfl.defender import Defender
from flower_vfl.leakage.monitor import LeakageMonitor
from flower_vfl.objectives import Task
from flower_vfl.parties.schedule import TRAIN, Plan, Schedule
from flower_vfl.protocol.arrays import to_array, to_tensor
from flower_vfl.protocol.messages import Content
from flower_vfl.transform import Seen

from .setup import Participants

if TYPE_CHECKING:
    from .vertical import VerticalStrategy


class Guard:
    """Applies the strategy's defenses: none if the label party applies them.

    A defense may look at embeddings too. Which rows a batch has follows from the shared
    seed: the strategy does not know the parties' row numbers, but can count the
    training rows.
    """

    def __init__(self, strategy: VerticalStrategy, participants: Participants) -> None:
        self.defender = Defender()
        if strategy.transforms and strategy.placement != "label":
            leakage, task = strategy.leakage, cast(Task, participants.label.task)
            watch = None if leakage is None else LeakageMonitor(leakage, task)
            self.defender = Defender(strategy.transforms, strategy.noise_seed, watch)
        self.seconds = 0.0  # of the last step
        self._schedule: Schedule | None = None
        if self.defender.sees_embeddings:
            codes = np.full(participants.sizes["train"], TRAIN, np.int8)
            plan = Plan(strategy.seed, strategy.batch_size)
            self._schedule = Schedule(codes, plan)

    def defend(
        self,
        reply: Content,
        parts: Mapping[str, Array],
        step: int,
        epoch: int,
        index: int,
    ) -> dict[str, Array]:
        """Return what each passive party gets: the gradient, transformed."""
        if self.defender.idle:
            return dict(reply.arrays)
        started = time.perf_counter()
        labels = None if reply.labels is None else to_tensor(reply.labels)
        seen = self._look(parts, epoch, index)
        given = reply.tensors(), labels, step, epoch
        defended = self.defender.defend(*given, seen=seen)
        reply.metrics.update(defended.metrics)
        self.seconds = time.perf_counter() - started
        return {name: to_array(g) for name, g in defended.gradients.items()}

    def _look(self, parts: Mapping[str, Array], epoch: int, index: int) -> Seen | None:
        if self._schedule is None:
            return None
        found = {name: to_tensor(part) for name, part in parts.items()}
        return Seen(found, self._schedule.training_rows(epoch, index))
