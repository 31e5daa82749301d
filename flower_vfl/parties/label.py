"""The label party: labels, an objective, and perhaps features of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.defender import Defender, DefenseFactory, LabelGuard, LabelStep
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.objectives import Objective, OptimizerFactory
from flower_vfl.parties.imputation.label_imputer import LabelImputer
from flower_vfl.protocol.config import PartyDescription, Shape, TrainingConfig
from flower_vfl.transform import GradientTransform, Seen

from .aggregation import Aggregation, check_embeddings, train_joined, try_shapes
from .base import ArrayLike, Features, Party, as_tensors, default_optimizer
from .evaluation import Evaluation


class LabelParty(Party):
    """The party that holds the labels and turns embeddings into gradients.

    Parameters
    ----------
    labels : ArrayLike | None
        One label per row: 0/1, class numbers or values. None for a party that only
        predicts.
    objective : Objective
        What it optimises, with the top model, e.g. ``CrossEntropy(nn.Linear(32, 1))``.
    features : Features | None (default: None)
        Features of its own, if it has any.
    model : nn.Module | None (default: None)
        Bottom model for its own features.
    aggregation : str | nn.Module | None (default: None)
        How embeddings are joined: ``"concat"``, ``"sum"``, ``"mean"``, ``"max"``,
        ``"product"`` or a module called with the list of embeddings (its own first).
        None takes the strategy's choice, or ``"concat"``.
    optimizer : OptimizerFactory (default: Adam with lr 1e-3)
        For the objective's modules, the own bottom model and an aggregation module.
    name, ids, split, device
        As for :class:`PassiveParty`.
    rows : int | None (default: None)
        Number of rows, for a party without labels and features.
    trust_server : bool (default: False)
        Whether raw gradients, and labels, may be handed to a defense that runs at the
        strategy, and whether the strategy may decide what noise is drawn from.
    defense : GradientTransform | None (default: None)
        A defense of its own, applied before anything leaves, whatever the strategy
        says.
    defenses : Callable[[str], GradientTransform] | None (default: None)
        Builds the defense that the strategy names for this node, usually
        ``flower_vfl.strategies.build_defense``.
    synthetic_labels : str (default: "majority")
        What stands in for labels that it does not hold, where the union of ids is
        trained on: ``"majority"``, ``"minority"``, ``"random_pos"``, ``"random_pred"``
        or ``"neighbors"``, perhaps with parameters.
    synthetic_features, secret
        As for :class:`PassiveParty`.
    calibration : str (default: "")
        Whether predictions undo what synthetic rows do to them: ``"te"`` when they are
        made, ``"tr"`` in the loss, empty not at all.
    """

    role = "label"

    def __init__(
        self,
        labels: ArrayLike | None,
        objective: Objective,
        features: Features | None = None,
        model: nn.Module | None = None,
        aggregation: str | nn.Module | None = None,
        optimizer: OptimizerFactory = default_optimizer,
        name: str | None = None,
        ids: Sequence[object] | NDArray[Any] | None = None,
        split: NDArray[np.int8] | None = None,
        device: str | torch.device = "auto",
        rows: int | None = None,
        trust_server: bool = False,
        defense: GradientTransform | None = None,
        defenses: DefenseFactory | None = None,
        synthetic_labels: str = "majority",
        synthetic_features: str = "sampling",
        calibration: str = "",
        secret: int | None = None,
    ) -> None:
        if (features is None) != (model is None):
            raise ConfigError(
                "a label party with features needs a bottom model for them, and a "
                "bottom model needs features: give both or neither"
            )
        own = (features, model, optimizer, name, ids, split, device)
        super().__init__(*own, synthetic_features, secret)
        if labels is not None and not isinstance(labels, Tensor):
            labels = np.asarray(labels)
        self.raw_labels = None if labels is None else as_tensors(labels)[0]
        self.objective = objective.to(self.device)
        self._own_aggregation = aggregation
        self._joiner = Aggregation(aggregation or "concat").to(self.device)
        self.trust_server = trust_server
        self._guard = LabelGuard(defense, defenses)
        self._rows = rows
        self._labels: Tensor | None = None
        self._shapes: dict[str, Shape] = {}
        self._evaluation = Evaluation()
        self._label_side = LabelImputer(self.union, synthetic_labels, calibration)

    @property
    def own_rows(self) -> int:
        """Number of samples that it holds."""
        if self.raw_labels is not None:
            return len(self.raw_labels)
        return len(self.features[0]) if self.features else (self._rows or 0)

    def describe(self, key: bytes) -> PartyDescription:
        """Return what the hello reports."""
        self.check_data()
        if self.features and len(self.features[0]) != self.own_rows:
            raise PartyError(
                self.name,
                f"has {len(self.features[0])} rows of features and {self.own_rows} "
                "labels",
                "Give one label per row of features",
            )
        if self.raw_labels is not None:
            try:
                self._labels = self.objective.encode(self.raw_labels).to(self.device)
            except ConfigError as error:
                remedy = f"The objective is {type(self.objective).__name__}"
                raise PartyError(self.name, str(error), remedy) from error
        shape = self.probe_shape()
        ids, split = self.digests(key)
        task = self.objective.task
        return PartyDescription(self.name, "label", self.rows, shape, task, ids, split)

    def configure(self, terms: TrainingConfig) -> None:
        """Take over the terms of the run and check that the embeddings fit."""
        chosen = self._own_aggregation or terms.aggregation or "concat"
        if terms.aggregation and chosen != terms.aggregation:
            own = chosen if isinstance(chosen, str) else type(chosen).__name__
            raise PartyError(
                self.name,
                f"is set to aggregation '{own}', the strategy to '{terms.aggregation}'",
                "Set it in one place only",
            )
        if isinstance(chosen, str):
            self._joiner = Aggregation(chosen)
        self._shapes = dict(terms.parties)
        self.objective.configure(self.make_optimizer)
        self._guard.configure(terms, self.name, self.objective.task, self.trust_server)
        super().configure(terms)
        training = self.agreed().rows("train")
        if self._labels is not None and len(training):
            settings = (self.objective, terms.parties, self.name)
            self._label_side.fit(self._labels, training, *settings)
            known, _ = self._label_side.labelled(training)
            self.objective.prepare(self.features, self._labels, known)
        shapes, own_shape = dict(terms.parties), self.probe_shape()
        if own_shape:
            shapes = {self.name: own_shape, **shapes}
        with self.random:
            try_shapes(self._joiner, self.objective, shapes, self.name, self.device)

    @property
    def defender(self) -> Defender:
        """What is done here to gradients before they leave."""
        return self._guard.defender

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this party's own optimizer."""
        return super().trained_parameters() + list(self._joiner.parameters())

    def optimizers(self) -> list[Optimizer]:
        """Return every optimizer of this party."""
        return super().optimizers() + self.objective.optimizers

    def train_step(
        self, step: int, epoch: int, index: int, embeddings: Mapping[str, Tensor]
    ) -> LabelStep:
        """Train on one batch and return a gradient for each passive party."""
        if step != self.step + 1:
            raise PartyError(
                self.name,
                f"has trained {self.step} steps and was asked for step {step}",
                "Restore all parties to one checkpoint",
                step,
            )
        rows = self.agreed().training_rows(epoch, index)
        if self._labels is None:
            raise PartyError(self.name, "has no labels", "Give labels to train", step)
        self._set_training(True)
        received = self._received(embeddings, len(rows), step)
        self.objective.rows = self._label_side.local(rows)
        with self.random:
            own = self._own_part(rows, ("train", step), True)
            parts = list(received.values())

            def join() -> Tensor:
                joined: Tensor = self._joiner([part.detach() for part in own + parts])
                return joined.detach()

            labels = self._label_side.batch(
                rows, step, lambda: self._expect(join), join
            )
            outcome, gradients = train_joined(
                self._joiner,
                own,
                parts,
                lambda joined: self.objective.step(joined, labels.used),
                self.descend,
            )
        loss = outcome.loss.item()
        if not math.isfinite(loss):
            raise PartyError(
                self.name,
                f"its loss is {loss}",
                "Lower the learning rate or look at the loss of the last steps",
                step,
            )
        self.step = step
        self.union.imputer.commit()
        by_party = dict(zip(received, gradients, strict=True))
        seen = Seen(received, rows)
        defended = self.defender.defend(
            by_party, labels.classes, step, epoch, labels.real, seen
        )
        metrics = {**outcome.metrics, **defended.metrics}
        return LabelStep(defended.gradients, loss, len(rows), metrics, labels.classes)

    def _own_part(
        self, rows: Tensor, at: tuple[int | str, ...], training: bool
    ) -> list[Tensor]:
        """Return the embedding of the own features, if there are any."""
        return [] if self.model is None else [self.embed_rows(rows, at, training)]

    def _expect(self, join: Callable[[], Tensor]) -> Tensor:
        """Return what the model now makes of a batch, without learning from it."""
        self._set_training(False)
        with torch.no_grad():
            expected = self.objective.expect(join())
        self._set_training(True)
        return expected

    def _set_training(self, training: bool) -> None:
        for module in (self.objective, self._joiner, self.model):
            if module is not None and module.training != training:
                module.train(training)

    def _received(
        self, embeddings: Mapping[str, Tensor], rows: int, step: int | None
    ) -> dict[str, Tensor]:
        """Return the embeddings on this device, in the agreed order, checked."""
        checked = check_embeddings(embeddings, self._shapes, rows, step)
        return {name: part.to(self.device) for name, part in checked.items()}

    def predict(
        self, split: str, index: int, embeddings: Mapping[str, Tensor]
    ) -> Tensor:
        """Return predictions for a part of a split."""
        rows = self.agreed().evaluation_rows(split, index)
        return self.predict_rows(rows, (split, index), embeddings)

    def predict_rows(
        self, rows: Tensor, at: tuple[int | str, ...], embeddings: Mapping[str, Tensor]
    ) -> Tensor:
        """Return predictions for some rows."""
        self._set_training(False)
        parts = self._received(embeddings, len(rows), self.step or None)
        with torch.no_grad(), self.random:
            own = self._own_part(rows, at, False)
            return self.objective.predict(self._joiner([*own, *parts.values()]))

    def evaluate(
        self, split: str, index: int, embeddings: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Collect predictions for a part of a split; return metrics after the last."""
        self._evaluation.add(index, self.predict(split, index, embeddings))
        schedule = self.agreed()
        parts = schedule.batches(split)
        if index + 1 < parts:
            return {}
        if self.raw_labels is None:
            raise PartyError(self.name, "has no labels", "Give labels to evaluate")
        own, labelled = self._label_side.labelled(schedule.rows(split))
        labels = self.raw_labels[own.cpu()]
        task = self.objective.task
        return self._evaluation.finish(parts, labels, labelled, task, self.name)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training changes, as of the last completed step."""
        return {
            "role": self.role,
            "step": self.step,
            "model": self.model.state_dict() if self.model is not None else {},
            "objective": self.objective.state_dict(),
            "aggregation": self._joiner.state_dict(),
            "optimizer": [o.state_dict() for o in self.optimizers()],
            "random": self.random.state_dict(),
            "defense": self.defender.state_dict(),
            "scores": self._evaluation.scores,
            **self.union.state_dict(),
            **self._label_side.state_dict(self.objective),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        if self.model is not None:
            self.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self._joiner.load_state_dict(state["aggregation"])
        for optimizer, saved in zip(self.optimizers(), state["optimizer"], strict=True):
            optimizer.load_state_dict(saved)
        self.random.load_state_dict(state["random"])
        self.defender.load_state_dict(state["defense"])
        self.step = state["step"]
        self._evaluation = Evaluation(state["scores"])
        self.union.load_state_dict(state, embeds=self.model is not None)
        self._label_side.load_state_dict(state, self.objective)
