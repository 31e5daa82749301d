"""Training with several batches under way (`pipeline = k`).

A passive party embeds the batch of step s from the weights after step s - 1 - k of the
same epoch, on every grid: the first k + 1 batches of an epoch are asked for at once;
then each gradient leaves with the request for the batch k + 1 steps later, or alone if
the epoch has no such batch. Only the last gradient is due when an epoch ends. Held-out
rows are evaluated while the next epoch begins, unless something waits for the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from flower_vfl.protocol.messages import Content, Verb

if TYPE_CHECKING:
    from .training import Training

Replies = Mapping[str, Content]  # by party
Take = Callable[[Replies], object]


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
        # Turns, and what takes the replies: in the order in which they are due.
        self._passive: deque[tuple[int, Take]] = deque()
        self._label: deque[tuple[int, Take]] = deque()
        self._questions: dict[int, Content] = {}  # by step, for the label party
        self._answers: dict[int, Content] = {}
        self._evaluations = 0  # whose results are still to come

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
            self._ask(Verb.BACKWARD, training.requests(), at, training.embeddings)
        self._train(step)
        while step not in self._answers:
            self._receive()
            self._train(step)
        self._step = step
        return self._questions.pop(step), self._answers.pop(step)

    def evaluates_ahead(self, splits: Sequence[str]) -> bool:
        """Say whether the next epoch may begin before this one is evaluated."""
        training, strategy = self._training, self._training.strategy
        waits = strategy.early_stopping is not None or training.evaluate_fn is not None
        most = max((training.participants.sizes[split] for split in splits), default=0)
        fits = 0 < most <= (strategy.evaluation_rows or most)
        return fits and not waits and not self._pauses_after(training.state.step)

    def evaluate(self, splits: Sequence[str], conclude: Callable[..., None]) -> None:
        """Ask about held-out rows, and hand the metrics over when they arrive."""
        training, found = self._training, dict[str, dict[str, float]]()
        label, step = training.participants.label.name, training.state.step

        def embedded(split: str, replies: Replies) -> None:
            embeddings = training.embeddings(replies, step)
            asked = {label: Content({"split": split}, embeddings)}
            self._leave_out([*replies.values(), *asked.values()])
            turn = training.messenger.post(Verb.EVALUATE, asked, step)
            self._label.append((turn, partial(evaluated, split)))

        def evaluated(split: str, replies: Replies) -> None:
            self._leave_out(replies.values())
            found[split] = replies[label].metrics
            if len(found) == len(splits):
                self._evaluations -= 1
                conclude(found)

        self._evaluations += 1
        for split in splits:
            requests = training.requests(config={"split": split}, index=0)
            self._ask(Verb.EMBED, requests, step, partial(embedded, split))

    def _leave_out(self, contents: Iterable[Content]) -> None:
        """Do not count messages as those of the step in which they travel."""
        self._training.messenger.traffic -= sum(each.size() for each in contents)

    def settle(self) -> None:
        """Wait for all that passive parties were asked for, and for evaluations."""
        while self._passive or self._evaluations:
            self._receive()

    def _ask(
        self, verb: Verb, requests: Mapping[str, Content], step: int, take: Take
    ) -> None:
        turn = self._training.messenger.post(verb, requests, step)
        self._passive.append((turn, take))

    def _forward(self, **batch: int) -> None:
        """Ask the passive parties to embed a batch."""
        training, step = self._training, batch["step"]

        def embedded(replies: Replies) -> None:
            embeddings = training.embeddings(replies, step)
            self._questions[step] = training.question(embeddings, **batch)

        self._ask(Verb.FORWARD, training.requests(**batch), step, embedded)

    def _train(self, step: int) -> None:
        """Ask the label party to train on `step`, and on what follows if it may."""
        training, following = self._training, self._trained + 1
        label = training.participants.label.name
        while following in self._questions:
            if following > step and self._pauses_after(following - 1):
                return
            asked = {label: self._questions[following]}
            turn = training.messenger.post(Verb.TRAIN_STEP, asked, following)
            self._label.append((turn, partial(self._answered, following)))
            self._trained, following = following, following + 1

    def _answered(self, step: int, replies: Replies) -> None:
        [self._answers[step]] = replies.values()

    def _pauses_after(self, step: int) -> bool:
        """Say whether the label party must not be ahead of a step."""
        strategy = self._training.strategy
        every, leakage = strategy.checkpoints.every, strategy.leakage
        stops = leakage is not None and leakage.action == "stop"
        return stops or self.interrupted() or (every > 0 and step % every == 0)

    def _receive(self) -> None:
        """Wait for replies, and take those that are complete in their order."""
        messenger = self._training.messenger
        messenger.receive()
        for waiting in (self._passive, self._label):
            while waiting:
                turn, take = waiting[0]
                if (replies := messenger.replies(turn)) is None:
                    break
                waiting.popleft()
                take(replies)
