"""The loop of vertical training: steps, evaluations, checkpoints, rewinding."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array
from flwr.supercore import log

from flower_vfl.errors import (
    ConfigError,
    PartyError,
    PartyRestartedError,
    VerticalError,
    at_party,
)
from flower_vfl.leakage.monitor import LIMIT
from flower_vfl.parties.checkpoints import FINAL, DamagedError, step_tag
from flower_vfl.parties.schedule import TRAIN, Plan, Schedule, count_batches
from flower_vfl.privacy import Guarantee
from flower_vfl.protocol.codecs import build_codec
from flower_vfl.protocol.config import Value
from flower_vfl.protocol.messages import (
    CLEAN,
    GRADIENT,
    Content,
    TensorArray,
    Verb,
    to_tensor,
)
from flower_vfl.rows import received_embeddings
from flower_vfl.transform import Seen

from .checkpoints import Rewinds, StrategyCheckpoints
from .evaluation import evaluate, evaluate_epoch
from .messenger import Messenger
from .pipeline import Pipeline
from .progress import TrainingProgress
from .setup import REMEDY, Participants, setup, strategy_defender
from .state import EvaluateFunction, RunState, interruptible
from .tracking import Trackers

if TYPE_CHECKING:
    from .vertical import VerticalStrategy


class Training:
    """One run of a strategy over a grid."""

    def __init__(
        self,
        strategy: VerticalStrategy,
        messenger: Messenger,
        participants: Participants,
        epochs: int,
    ) -> None:
        self.strategy, self.messenger = strategy, messenger
        self.participants, self.epochs = participants, epochs
        self.state = RunState()
        self.evaluate_fn: EvaluateFunction | None = None
        leakage, rows = strategy.leakage, participants.sizes["train"]
        self.steps = count_batches(rows, strategy.batch_size or max(rows, 1))
        self.defender = strategy_defender(strategy, participants.label)
        self._codec = build_codec(strategy.compression.embeddings)
        # The parties' row numbers are not known here, but training rows can be counted.
        codes = np.full(rows, TRAIN, np.int8)
        self._schedule = Schedule(codes, Plan(strategy.seed, strategy.batch_size))
        self._gradients: Mapping[str, Array] = {}  # made, but not yet delivered
        self.gradient_step = 0
        # for measuring every layer, in simulations
        self._labels: Array | None = None
        self._clean: Mapping[str, Array] = {}
        self._probe: dict[str, str] = {}
        if leakage is not None and leakage.probes:
            task = participants.label.task
            self._probe = {"probe": leakage.to_text(), "task": task}
        self._shows_labels = leakage is not None and leakage.shows_labels
        self._wants_labels = self._shows_labels or self.defender.requires_labels
        self._checkpoints = StrategyCheckpoints(strategy)
        self.trackers = Trackers(strategy.trackers)
        self._rewinds = Rewinds()
        self.pipeline = Pipeline(self) if strategy.pipeline else None

    def run(self) -> RunState:
        """Train until the last epoch or until early stopping, and return the state."""
        shown, every = self.strategy.progress, self.strategy.checkpoints.every
        bar = TrainingProgress(self.epochs, self.steps, self.state.step, shown)
        with self.trackers.telling(self), bar, interruptible() as interrupted:
            if self.pipeline is not None:
                self.pipeline.interrupted = interrupted
            if not self.state.step:
                self._checkpoints.begin()
            if every and not self.state.step:
                self.checkpoint(step_tag(0))
            while True:
                try:
                    ended = self.state.step >= self.epochs * self.steps
                    if self.state.stopped or ended:
                        self._finish()
                        return self.state
                    epoch, index = divmod(self.state.step, self.steps)
                    loss, leaking = self.step(epoch + 1, index)
                    if bar.shown:
                        bar.stepped(self.state.step, epoch + 1, loss)
                    if leaking or index + 1 == self.steps:
                        self._close_epoch(epoch + 1, index, bar, leaking)
                    elif every and self.state.step % every == 0:
                        self.checkpoint(step_tag(self.state.step))
                    if self.pipeline is not None and self.pipeline.ahead:
                        continue  # the label party has been asked for the next step
                    if interrupted():
                        if self.state.step not in self._checkpoints.steps():
                            self.checkpoint(step_tag(self.state.step))
                        log(WARNING, "interrupted. %s", self._checkpoints.advice())
                        raise KeyboardInterrupt
                except PartyRestartedError as error:
                    self._rewind(error)
                except VerticalError as error:
                    error.add_note(self._checkpoints.advice())
                    raise

    def step(self, epoch: int, index: int) -> tuple[float, list[str]]:
        """Train on one batch.

        The passive parties get the gradients of the step before and answer with their
        embeddings; the label party gets these and answers with one gradient per party;
        the defense changes the gradients, which leave with the next step.

        Returns the loss, and the parties that exceeded a leak limit that stops the run.
        """
        started, traffic = time.perf_counter(), self.messenger.traffic
        state, step = self.state, self.state.step + 1
        label, leakage = self.participants.label.name, self.strategy.leakage

        if self.pipeline is None:
            requests = self.requests(step=step, epoch=epoch, index=index)
            replies = self.messenger.ask(Verb.FORWARD, requests, step)
            asked = self.question(self.embeddings(replies, step), step, epoch, index)
            reply = self.messenger.ask(Verb.TRAIN_STEP, {label: asked}, step)[label]
        else:
            asked, reply = self.pipeline.exchange(step, epoch, index)

        withheld = reply.config.get("withheld")
        known = {*reply.arrays, *(withheld if isinstance(withheld, list) else ())}
        missing = self.participants.passive.keys() - known
        if missing or "rows" not in reply.metrics:
            problem = f"its reply lacks its rows or gradients of {sorted(missing)}"
            raise PartyError(label, problem, REMEDY, step)
        if self._shows_labels:
            found = reply.arrays
            reply.arrays = {
                n: found[n] for n in self.participants.passive if n in found
            }
            self._clean = {n: found.get(f"{CLEAN}/{n}", found[n]) for n in reply.arrays}
        gradients, measured = reply.arrays, reply.measured
        if not self.defender.idle:
            defending = time.perf_counter()
            seen = None
            if self.defender.needs_rows:
                seen = self._seen(asked.arrays, epoch, index)
            tensors, own = self.defender.defend(
                reply.tensors(),
                None if reply.labels is None else to_tensor(reply.labels),
                step,
                epoch,
                seen=seen,
                last=index == self.steps - 1,
                late="late" in asked.config,
            )
            gradients = {name: TensorArray(g) for name, g in tensors.items()}
            measured = measured + own
            state.defense_seconds += time.perf_counter() - defending

        self._gradients, self.gradient_step = gradients, step
        self._labels = reply.labels if self._shows_labels else None
        state.step = step
        state.rows[step] = rows = reply.metrics.pop("rows")
        state.steps.append((reply.metrics, rows))
        if measured:
            state.records += measured
        if self.strategy.trackers:
            values: dict[int, dict[str, float]] = {}
            for each in measured:  # also what arrived late
                values.setdefault(each.step, {})[each.name] = each.value
            values[step] = {**reply.metrics, **values.get(step, {})}
            for number in sorted(values):
                self.trackers.tell("step", number, values[number])
        state.seconds += time.perf_counter() - started
        state.traffic += self.messenger.traffic - traffic
        leaking: list[str] = []
        if leakage is not None and leakage.action == "stop":
            leaking = [each.party for each in measured if each.metric == LIMIT]
        return reply.metrics.get("loss", math.nan), leaking

    def _seen(self, embeddings: Mapping[str, Array], epoch: int, index: int) -> Seen:
        """Return the embeddings of a batch for a defense that looks at them."""
        tensors = {name: to_tensor(part) for name, part in embeddings.items()}
        shapes = {name: each.shape for name, each in self.participants.passive.items()}
        rows, step = self._schedule.training_batches(epoch)[index], self.state.step + 1
        given = tensors, shapes, len(rows), rows.device, self._codec, step
        return Seen(received_embeddings(*given), rows)

    def requests(self, **fields: Any) -> dict[str, Content]:
        """Return a request to every passive party, with the gradient that is due."""
        labels, clean = self._labels, self._clean
        arrays = {name: {GRADIENT: array} for name, array in self._gradients.items()}
        for name in clean.keys() & arrays.keys():
            arrays[name][CLEAN] = clean[name]
        fields["gradient_step"] = self.gradient_step
        self._gradients, self._clean = {}, {}
        self.gradient_step, self._labels = 0, None
        config = {**self._probe, **fields.pop("config", {})}
        return {
            name: Content(dict(config), arrays.get(name, {}), labels=labels, **fields)
            for name in self.participants.passive
        }

    def embeddings(
        self, replies: Mapping[str, Content], step: int | None = None
    ) -> dict[str, Array]:
        """Return the embeddings that came back, one of each party for a step."""
        embeddings = {}
        for name, reply in replies.items():
            if reply.measured:
                self.state.probed += reply.measured
            if name in reply.arrays:
                embeddings[name] = reply.arrays[name]
            elif step is not None:
                raise PartyError(name, "its reply has no embedding", REMEDY, step)
        return embeddings

    def question(
        self, embeddings: Mapping[str, Array], step: int, epoch: int, index: int
    ) -> Content:
        """Return the request to train on a batch, for the label party."""
        asked = Content(arrays=embeddings, step=step, epoch=epoch, index=index)
        if self._wants_labels:
            asked.config["labels"] = True
        # What a step leaks may be reported with one of the next, unless a checkpoint
        # or the end of the epoch comes in between.
        every = self.strategy.checkpoints.every
        last = index == self.steps - 1 or (every and step % every == 0)
        if self.strategy.leakage is not None and not last:
            asked.config["late"] = True
        return asked

    def _tell_passive(self, verb: Verb, **config: Value) -> dict[str, Content]:
        """Send a request to every passive party, with the gradient that is due."""
        if self.pipeline is not None:
            self.pipeline.settle()
        requests = self.requests(config=config)
        replies = self.messenger.ask(verb, requests, self.state.step)
        self.embeddings(replies)
        return replies

    def _close_epoch(
        self, epoch: int, index: int, bar: TrainingProgress, leaking: list[str]
    ) -> None:
        """End an epoch, or a run that leaks too much within one."""
        ended = index + 1 == self.steps
        if leaking and not ended:  # kept as it is, so that a resumed epoch is whole
            self.checkpoint(step_tag(self.state.step))
        with at_party(self.participants.label.name, REMEDY):
            label = Guarantee.from_text(self.participants.label.privacy)
        self.state.close_epoch(epoch, label, self.participants.passive)
        self.trackers.tell("epoch", epoch, self.state.step, self.state.train[epoch])
        every, saved = self.strategy.evaluate_every, self.strategy.checkpoints.every
        last = bool(leaking) or epoch == self.epochs
        if every and (last or epoch % every == 0):
            evaluate_epoch(self, epoch, bar, last)
        if ended and (leaking or (saved and self.state.step % saved == 0)):
            self.checkpoint(step_tag(self.state.step))
        if leaking:  # not before a checkpoint: a resumed run goes on
            reason = f"the leak limit was exceeded for {', '.join(leaking)}"
            log(WARNING, "stopped: %s. %s", reason, self._checkpoints.advice())
            self.state.stopped, self.state.reason = True, reason

    def checkpoint(self, tag: str) -> None:
        """Have every party write its part of a checkpoint; commit it with our own."""
        asked, label = self._checkpoints.request(tag), self.participants.label.name
        replies = self._tell_passive(Verb.CHECKPOINT, **asked)
        request = {label: Content(asked)}
        replies |= self.messenger.ask(Verb.CHECKPOINT, request, self.state.step)
        digests = {}
        for name, reply in replies.items():
            with at_party(name, REMEDY):
                digests[name] = reply.text("digest")
        run, defender = self.state.state_dict(), self.defender.state_dict()
        self._checkpoints.commit(tag, {"run": run, "defender": defender}, digests)

    def restore(self, tag: str, loss: str = "") -> None:
        """Bring all back to a checkpoint; `loss` is another one for private labels."""
        label = self.participants.label.name
        everyone = [label, *self.participants.passive]
        part, contents = self._checkpoints.load(tag, everyone)
        if loss:
            contents[label].config["loss"] = loss
        replies = self.messenger.ask(Verb.RESTORE, contents)
        self._checkpoints.adopt(tag, part, replies)
        self._gradients, self._clean = {}, {}
        self.gradient_step, self._labels = 0, None
        self.defender.load_state_dict(part["defender"])
        self.state = RunState.from_state(part["run"])
        if self.pipeline is not None:
            self.pipeline.reset(self.state.step)

    def resume(self) -> None:
        """Go back to the newest step of which every party has an undamaged part."""
        problems = ""
        for step in self._checkpoints.steps():
            try:
                self.restore(step_tag(step))
            except DamagedError as error:
                problems += f". {error}"
                log(WARNING, "checkpoint of step %d cannot be used: %s", step, error)
            else:
                log(INFO, "resumed after step %d", step)
                return
        raise ConfigError(
            "there is no checkpoint that every party has; give every node a state-dir, "
            "set Checkpoints(every=..., folder=...), and start once without resume"
            + problems
        )

    def _rewind(self, error: PartyRestartedError) -> None:
        """Bring everyone back after a party came back without its memory."""
        self._rewinds.count(error, self.state.step)
        log(WARNING, "%s", error)
        self.messenger.drop()
        self.participants = setup(self.strategy, self.messenger, reuse=True)
        try:
            self.resume()
        except ConfigError as no_checkpoint:
            raise error from no_checkpoint

    def _finish(self) -> None:
        if self.state.best_tag:
            ended = self.state
            self._tell_passive(Verb.BACKWARD)
            self.restore(self.state.best_tag)
            self.state = ended
        if self.strategy.leakage is not None and self.strategy.leakage.by_epoch:
            found = {"train": evaluate(self, "train")}  # what the model itself tells
            self.state.evaluate.setdefault(max(self.state.train), {}).update(found)
        if self.strategy.checkpoints.keep_final:
            self.checkpoint(FINAL)
        elif self.gradient_step:
            self._tell_passive(Verb.BACKWARD)
