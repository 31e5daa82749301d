"""The loop of vertical training: steps, evaluations, checkpoints, rewinding."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ConfigRecord
from flwr.supercore import log

from flower_vfl.errors import (
    ConfigError,
    PartyRestartedError,
    VerticalError,
    unknown_name,
)
from flower_vfl.leakage.monitor import LIMIT, split_late
from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.parties.checkpoints import step_tag, tagged_step
from flower_vfl.parties.schedule import count_batches
from flower_vfl.protocol.messages import Content, Verb, array_record, gradient_arrays

from .checkpoints import StrategyCheckpoints
from .guard import Guard
from .messenger import Messenger, embeddings, noted
from .progress import TrainingProgress
from .setup import Participants
from .state import RunState, interruptible
from .tracking import Trackers

if TYPE_CHECKING:
    from .vertical import VerticalStrategy

_SAME_STEP_REWINDS = 3  # as often may one step be tried again before giving up


class Training:
    """One run of a strategy over a grid.

    Parameters
    ----------
    strategy : VerticalStrategy
        The settings, and Flower's four methods that make and read messages.
    messenger : Messenger
        Reaches the parties.
    participants : Participants
        Who they are.
    epochs : int
        Number of epochs.
    """

    def __init__(
        self,
        strategy: VerticalStrategy,
        messenger: Messenger,
        participants: Participants,
        epochs: int,
    ) -> None:
        self.strategy = strategy
        self.messenger = messenger
        self.participants = participants
        self.epochs = epochs
        self.state = RunState()
        self._guard = Guard(strategy, participants)
        self.defender = self._guard.defender
        rows = participants.sizes["train"]
        self.steps = count_batches(rows, strategy.batch_size or max(rows, 1))
        self._gradients: dict[str, Array] = {}  # made, but not yet delivered
        self.labels: Array | None = None  # for measuring every layer, in simulations
        leakage = strategy.leakage
        self._probe = leakage.to_text() if leakage and leakage.probes else ""
        self._shown = leakage is not None and leakage.shows_labels
        self._leaky: list[str] = []  # limits that the last step exceeded
        self._gradient_step = 0
        self._keeper = StrategyCheckpoints(strategy.state_dir)
        self._trackers = Trackers(strategy.trackers)
        self._rewinds = 0
        self._rewound_at = -1

    def run(self) -> RunState:
        """Train until the last epoch or until early stopping, and return the state."""
        shown = self.strategy.progress
        bar = TrainingProgress(self.epochs, self.steps, self.state.step, shown)
        with self._trackers.telling(self), bar, interruptible() as interrupted:
            if self.strategy.checkpoint_every and not self.state.step:
                self._checkpoint(step_tag(0))
            while True:
                try:
                    if (
                        self.state.stopped
                        or self.state.step >= self.epochs * self.steps
                    ):
                        self._finish()
                        return self.state
                    self._advance(bar)
                    if interrupted():
                        self._checkpoint(step_tag(self.state.step))
                        log(WARNING, "interrupted. %s", self._keeper.advice())
                        raise KeyboardInterrupt
                except PartyRestartedError as error:
                    self._rewind(error)
                except VerticalError as error:
                    error.add_note(self._keeper.advice())
                    raise

    def _advance(self, bar: TrainingProgress) -> None:
        epoch, index = divmod(self.state.step, self.steps)
        started, traffic = time.perf_counter(), self.messenger.traffic
        loss = self._step(epoch + 1, index)
        self.state.seconds += time.perf_counter() - started
        self.state.traffic += self.messenger.traffic - traffic
        bar.stepped(self.state.step, epoch + 1, loss)
        leaks, ended = self._leaks_too_much(), index == self.steps - 1
        if leaks and not ended:  # kept as it is, so that a resumed epoch is whole
            self._checkpoint(step_tag(self.state.step))
        if ended or leaks:
            self._close_epoch(epoch + 1, bar, index + 1, leaks)
        every = self.strategy.checkpoint_every
        due = ended if leaks else every and self.state.step % every == 0
        if due:
            self._checkpoint(step_tag(self.state.step))
        if leaks:  # not before a checkpoint: a resumed run goes on
            self._stop_leak()

    def _leaks_too_much(self) -> bool:
        leakage = self.strategy.leakage
        return leakage is not None and leakage.action == "stop" and bool(self._leaky)

    def _stop_leak(self) -> None:
        parties = ", ".join(name.partition("/")[2] for name in self._leaky)
        self.state.reason = f"the leak limit was exceeded for {parties}"
        log(WARNING, "stopped: %s. %s", self.state.reason, self._keeper.advice())
        self.state.stopped = True

    def _step(self, epoch: int, index: int) -> float:
        """Swap embeddings for gradients once; return the loss."""
        step = self.state.step + 1
        strategy, messenger = self.strategy, self.messenger
        where = {"step": step, "index": index}
        gradients = array_record(self._gradients)
        config = ConfigRecord({**where, **self._gradient_config()})
        asked = strategy.configure_train(epoch, gradients, config, messenger.grid)
        replies = messenger.deliver(list(asked), step)
        parts, noted = strategy.aggregate_train(epoch, replies)
        self._delivered(noted or {})
        label = self.participants.label.name
        content = Content({**where, "epoch": epoch}, parts or {})
        if self.defender.requires_labels or self._shown:
            content.config["labels"] = True
        self.defender.late = self._measured_late(step, index)
        if self.defender.late:
            content.config["late"] = True
        reply = messenger.ask(Verb.TRAIN_STEP, {label: content}, step)[label]
        sent: dict[str, Array] = dict(parts or {})
        self._gradients = self._guard.defend(reply, sent, step, epoch, index)
        self.state.defense_seconds += self._guard.seconds
        self.labels = reply.labels if self._shown else None
        self._gradient_step = self.state.step = step
        late, metrics = split_late(reply.metrics)
        rows = metrics.pop("rows")
        if late:
            self.state.add_late(late)
            self._trackers.step(step - 1, late)
        self.state.add(metrics, rows)
        self._trackers.step(step, metrics)
        self._leaky = [name for name in metrics if name.startswith(LIMIT)]
        return metrics["loss"]

    def _measured_late(self, step: int, index: int) -> bool:
        """Return whether what this step leaks may be reported with the next step."""
        every = self.strategy.checkpoint_every
        last = index == self.steps - 1 or (every and step % every == 0)
        return self.strategy.leakage is not None and not last

    def _gradient_config(self) -> dict[str, int | str]:
        due: dict[str, int | str] = {}
        if self._gradient_step:
            due["gradient-step"] = self._gradient_step
        if self._probe:
            due["probe"], due["task"] = self._probe, self.participants.label.task
        return due

    def _delivered(self, noted: Mapping[str, Any]) -> None:
        """Forget the gradients that arrived; keep what was measured on the way."""
        for name, value in noted.items():
            self.state.trace(name, self._gradient_step, float(value))
        self._gradients, self._gradient_step, self.labels = {}, 0, None

    def _tell_passive(self, verb: Verb, **config: str) -> None:
        """Send a request to every passive party, with the gradient that is due."""
        contents = {
            name: Content(
                config={**config, **self._gradient_config()},
                arrays=gradient_arrays(self._gradients.get(name)),
                labels=self.labels,
            )
            for name in self.participants.passive
        }
        self._delivered(noted(self.messenger.ask(verb, contents, self.state.step)))

    def _close_epoch(
        self, epoch: int, bar: TrainingProgress, steps: int, last: bool
    ) -> None:
        state = self.state
        state.close_epoch(epoch, steps)
        self._trackers.epoch(epoch, state.step, state.train[epoch])
        every = self.strategy.evaluate_every
        last = last or epoch == self.epochs
        if not every or (epoch % every and not last):
            return
        held_out = [s for s in ("valid", "test") if self.participants.sizes[s]]
        metrics = {
            f"{split}_{name}": value
            for split in held_out
            for name, value in self.evaluate(split, epoch).items()
        }
        state.evaluate[epoch] = metrics
        self._trackers.epoch(epoch, state.step, metrics)
        main = f"{held_out[0]}_{self._metric()}" if held_out else ""
        if main in metrics:
            bar.evaluated(main, metrics[main])
        shown = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items())
        log(INFO, "epoch %d: loss %.4f, %s", epoch, state.train[epoch]["loss"], shown)
        stopping, task = self.strategy.early_stopping, self.participants.label.task
        if stopping is not None:
            best = stopping.judge(state, metrics, MAIN_METRIC[task])
            if best and stopping.restore_best:
                self._checkpoint("best")

    def _metric(self) -> str:
        stopping = self.strategy.early_stopping
        chosen = stopping.metric if stopping is not None else None
        return chosen or MAIN_METRIC[self.participants.label.task]

    def evaluate(self, split: str, epoch: int) -> dict[str, float]:
        """Return the metrics of a split."""
        metrics: dict[str, float] = {}
        for index in range(self._parts(split)):
            parts = self._embeddings(split, index, epoch)
            content = Content({"split": split, "index": index}, parts)
            label = self.participants.label.name
            messages = self.messenger.messages(Verb.EVALUATE, {label: content})
            replies = self.messenger.deliver(messages, self.state.step)
            record = self.strategy.aggregate_evaluate(epoch, replies)
            metrics = {k: float(v) for k, v in (record or {}).items()}  # type: ignore[arg-type]
        return metrics

    def predict(self, split: str) -> list[Array]:
        """Return the predictions for a split, part by part."""
        parts = []
        label = self.participants.label.name
        for index in range(self._parts(split)):
            embedded = self._embeddings(split, index, 0)
            content = Content({"split": split, "index": index}, embedded)
            reply = self.messenger.ask(Verb.PREDICT, {label: content}, None)[label]
            parts.append(reply.arrays["predictions"])
        return parts

    def _parts(self, split: str) -> int:
        if split not in self.participants.sizes:
            raise unknown_name("split", split, self.participants.sizes)
        rows = self.participants.sizes[split]
        return count_batches(rows, self.strategy.evaluation_rows or max(rows, 1))

    def _embeddings(self, split: str, index: int, epoch: int) -> dict[str, Array]:
        where: dict[str, Any] = {"split": split, "index": index}
        messages = self.strategy.configure_evaluate(
            epoch,
            array_record(self._gradients),
            ConfigRecord({**where, **self._gradient_config()}),
            self.messenger.grid,
        )
        replies = self.messenger.deliver(list(messages), self.state.step)
        contents = self.messenger.collect(replies, self.state.step)
        self._delivered(noted(contents))
        return embeddings(contents, self.state.step)

    def _checkpoint(self, tag: str) -> None:
        """Have every party keep its state after the last completed step."""
        self._tell_passive(Verb.CHECKPOINT, tag=tag)
        label = self.participants.label.name
        self.messenger.ask(Verb.CHECKPOINT, {label: Content({"tag": tag})})
        kept = {
            "run": asdict(self.state),
            "defender": self.defender.state_dict(),
        }
        self._keeper.save(tag, kept)

    def restore(self, tag: str) -> None:
        """Bring every party, and this run, back to a checkpoint."""
        contents = {name: Content({"tag": tag}) for name in self.messenger.nodes}
        replies = self.messenger.ask(Verb.RESTORE, contents)
        steps = {name: reply.number("step") for name, reply in replies.items()}
        if len(set(steps.values())) != 1:
            raise ConfigError(f"checkpoint '{tag}' is of different steps: {steps}")
        self._delivered({})
        step = next(iter(steps.values()))
        kept = self._keeper.load(tag)
        if kept is None:
            log(WARNING, "the strategy has no part of '%s': its history is lost", tag)
            defender = self.defender.state_dict()
            kept = {"run": asdict(RunState(step=step)), "defender": defender}
            self._keeper.kept[tag] = copy.deepcopy(kept)
        self.defender.load_state_dict(kept["defender"])
        self.state = RunState(**kept["run"])

    def resume(self) -> None:
        """Go back to the newest step that every party has a checkpoint of."""
        self._go_back(self.participants.common_checkpoints())

    def _go_back(self, tags: set[str]) -> None:
        found = [tagged_step(tag) for tag in tags]
        steps = [step for step in found if step is not None]
        if not steps:
            raise ConfigError(
                "there is no checkpoint that every party has; give every node a "
                "state-dir, set checkpoint_every, and start once without resume"
            )
        self.restore(step_tag(max(steps)))
        log(INFO, "resumed after step %d", self.state.step)

    def _rewind(self, error: PartyRestartedError) -> None:
        """Bring everyone back after a party came back without its memory."""
        step = self.state.step
        self._rewinds = self._rewinds + 1 if step == self._rewound_at else 1
        self._rewound_at = step
        if self._rewinds > _SAME_STEP_REWINDS:
            error.add_note(f"step {step + 1} was tried {self._rewinds} times")
            raise error
        log(WARNING, "%s", error)
        self.participants = self.strategy.meet(self.messenger)
        try:
            self._go_back(
                self.participants.common_checkpoints() & set(self._keeper.kept)
            )
        except ConfigError as no_checkpoint:
            raise error from no_checkpoint

    def _finish(self) -> None:
        stopping = self.strategy.early_stopping
        if (
            stopping is not None
            and stopping.restore_best
            and self.state.best is not None
        ):
            ended = self.state
            self._tell_passive(Verb.BACKWARD)
            self.restore("best")
            self.state = ended
        if self.strategy.keep_final:
            self._checkpoint("final")
        elif self._gradient_step:
            self._tell_passive(Verb.BACKWARD)
