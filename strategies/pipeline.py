"""Training with several batches under way (`pipeline = k`).

A passive party embeds the batch of step s from the weights after step s - 1 - k of the
same epoch, on every grid: the first k + 1 batches of an epoch are asked for at once;
then each gradient leaves with the request for the batch k + 1 steps later, or alone if
the epoch has no such batch. Only the last gradient is due when an epoch ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from flower_vfl.protocol.messages import Content, Verb

if TYPE_CHECKING:
    from .training import Training


class Pipeline:
    """The requests of a run that are under way, and the replies that came early."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.interrupted: Callable[[], bool] = lambda: False
        self.reset(0)

    def reset(self, step: int) -> None:
        """Go on after a step, with nothing under way."""
        self._step = step  # the last one that was exchanged
        self._embedded = self._trained = step  # the last ones that were asked for
        self._passive: deque[tuple[int, dict[str, int]]] = deque()  # turns and batches
        self._label: deque[tuple[int, int]] = deque()  # turns and steps
        self._questions: dict[int, Content] = {}  # by step, for the label party
        self._answers: dict[int, Content] = {}

    @property
    def ahead(self) -> bool:
        """Whether the label party was asked to train on a later batch."""
        return self._trained > self._step

    def exchange(self, step: int, epoch: int, index: int) -> tuple[Content, Content]:
        """Send what is due, and return the request for a batch and the reply to it."""
        training = self._training
        last = step + training.steps - 1 - index  # of the epoch
        ahead = min(step + training.strategy.pipeline, last)
        for later in range(self._embedded + 1, ahead + 1):
            self._forward(step=later, epoch=epoch, index=index + later - step)
        self._embedded = ahead
        if training.gradient_step:  # there was no forward pass to send it with
            at = training.gradient_step
            turn = training.messenger.post(Verb.BACKWARD, training.requests(), at)
            self._passive.append((turn, {}))
        self._train(step)
        while step not in self._answers:
            self._receive()
            self._train(step)
        self._step = step
        return self._questions.pop(step), self._answers.pop(step)

    def settle(self) -> None:
        """Wait for all that the passive parties were asked for."""
        while self._passive:
            self._receive()

    def _forward(self, **batch: int) -> None:
        """Ask the passive parties to embed a batch."""
        training = self._training
        requests = training.requests(**batch)
        turn = training.messenger.post(Verb.FORWARD, requests, batch["step"])
        self._passive.append((turn, batch))

    def _train(self, step: int) -> None:
        """Ask the label party to train on `step`, and on what follows if it may."""
        training, following = self._training, self._trained + 1
        label = training.participants.label.name
        while following in self._questions:
            if following > step and self._pauses_after(following - 1):
                return
            asked = {label: self._questions[following]}
            turn = training.messenger.post(Verb.TRAIN_STEP, asked, following)
            self._label.append((turn, following))
            self._trained, following = following, following + 1

    def _pauses_after(self, step: int) -> bool:
        """Say whether the label party must not be ahead of a step."""
        strategy = self._training.strategy
        every, leakage = strategy.checkpoints.every, strategy.leakage
        stops = leakage is not None and leakage.action == "stop"
        return stops or self.interrupted() or (every > 0 and step % every == 0)

    def _receive(self) -> None:
        """Wait for replies, and take those that are complete in their order."""
        training, messenger = self._training, self._training.messenger
        messenger.receive()
        while self._passive:
            turn, batch = self._passive[0]
            if (replies := messenger.replies(turn)) is None:
                break
            self._passive.popleft()
            embeddings = training.embeddings(replies, batch.get("step"))
            if batch:
                question = training.question(embeddings, **batch)
                self._questions[batch["step"]] = question
        while self._label:
            turn, step = self._label[0]
            if (replies := messenger.replies(turn)) is None:
                break
            self._label.popleft()
            [self._answers[step]] = replies.values()
