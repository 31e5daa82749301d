"""The label party: labels, an objective, and perhaps features of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from .aggregation import Aggregation, check_embeddings
from .defending import DefenseFactory, LabelGuard
from .errors import ConfigError, PartyError
from .metrics import METRICS
from .objectives import Objective, OptimizerFactory, Outcome
from .party import (
    ArrayLike,
    Features,
    Party,
    as_tensors,
    default_optimizer,
)
from .terms import Description, Shape, Terms
from .transform import GradientTransform


@dataclass
class LabelStep:
    """What one training step of the label party brings.

    Parameters
    ----------
    gradients : dict[str, Tensor]
        What leaves for each passive party; one whose gradient a defense withheld is
        missing.
    loss : float
        The loss of the batch.
    rows : int
        Rows of the batch.
    metrics : dict[str, float]
        Anything else that the objective and the defenses report.
    labels : Tensor
        Labels of the batch, for a defense of the label party's own.
    """

    gradients: dict[str, Tensor]
    loss: float
    rows: int
    metrics: dict[str, float]
    labels: Tensor


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
    ) -> None:
        if (features is None) != (model is None):
            raise ConfigError(
                "a label party with features needs a bottom model for them, and a "
                "bottom model needs features: give both or neither"
            )
        super().__init__(features, model, optimizer, name, ids, split, device)
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
        self._scores: list[Tensor] = []

    @property
    def rows(self) -> int:
        """Number of samples."""
        if self.raw_labels is not None:
            return len(self.raw_labels)
        return len(self.features[0]) if self.features else (self._rows or 0)

    def describe(self, key: bytes) -> Description:
        """Return what the hello reports.

        Parameters
        ----------
        key : bytes
            Key of this session's digests.
        """
        self.check_data()
        if self.features and len(self.features[0]) != self.rows:
            raise PartyError(
                self.name,
                f"has {len(self.features[0])} rows of features and {self.rows} labels",
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
        return Description(self.name, "label", self.rows, shape, task, ids, split)

    def agree(self, terms: Terms) -> None:
        """Take over the terms of the run and check that the embeddings fit.

        Parameters
        ----------
        terms : Terms
            What all parties agreed on.
        """
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
        self._guard.agree(terms, self.name, self.objective.task, self.trust_server)
        super().agree(terms)
        if self._labels is not None and self.agreed().size("train"):
            training = self._evaluated_rows("train")
            self.objective.prepare(self.features, self._labels, training)
        self._try_shapes(terms.parties)

    def _try_shapes(self, parties: Mapping[str, Shape]) -> None:
        """Send zeros through aggregation and top model, to fail before training."""
        shapes = dict(parties)
        own = self.probe_shape()
        self._joiner.check({self.name: own, **shapes} if own else shapes)
        both = ([own] if own else []) + list(shapes.values())
        parts = [torch.zeros(2, *shape, device=self.device) for shape in both]
        was_training = self.objective.training
        self.objective.eval()
        try:
            with torch.no_grad(), self.random:
                self.objective.predict(self._joiner.eval()(parts))
        except (RuntimeError, ValueError, IndexError) as error:
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise PartyError(
                self.name,
                f"the embeddings ({listed}) do not fit aggregation "
                f"'{self._joiner.name}' and the top model: {error}",
                "Make the top model's input as wide as the joined embedding",
            ) from error
        finally:
            self.objective.train(was_training)
            self._joiner.train()

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this party's own optimizer."""
        return super().trained_parameters() + list(self._joiner.parameters())

    def optimizers(self) -> list[Optimizer]:
        """Return every optimizer of this party."""
        return super().optimizers() + self.objective.optimizers

    def train_step(
        self, step: int, epoch: int, index: int, embeddings: Mapping[str, Tensor]
    ) -> LabelStep:
        """Train on one batch and return a gradient for each passive party.

        Parameters
        ----------
        step : int
            The training step, from 1.
        epoch : int
            The epoch, from 1.
        index : int
            The batch within the epoch, from 0.
        embeddings : Mapping[str, Tensor]
            The embedding of each passive party.
        """
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
        labels = self._labels.index_select(0, rows)
        self._set_training(True)
        received = self._received(embeddings, len(rows), step)
        self.objective.rows = rows
        with self.random:
            own = [self.run_model(rows)] if self.model is not None else []
            outcome, gradients = self._descend(own, list(received.values()), labels)
        loss = outcome.loss.item()
        if not math.isfinite(loss):
            raise PartyError(
                self.name,
                f"its loss is {loss}",
                "Lower the learning rate or look at the loss of the last steps",
                step,
            )
        self.step = step
        by_party = dict(zip(received, gradients, strict=True))
        defended = self._guard.defender.defend(by_party, labels, step, epoch)
        metrics = {**outcome.metrics, **defended.metrics}
        return LabelStep(defended.gradients, loss, len(rows), metrics, labels)

    def _descend(
        self, own: list[Tensor], received: list[Tensor], labels: Tensor
    ) -> tuple[Outcome, list[Tensor]]:
        """Train every module of this party; return the received parts' gradients."""
        if self._joiner.linear:
            joined = self._joiner([part.detach() for part in [*own, *received]])
            outcome = self.objective.step(joined.detach().requires_grad_(), labels)
            gradients = self._joiner.pull_back(outcome.gradient, [*own, *received])
            if own and own[0].requires_grad:
                self.descend(own[0], gradients[0])
            return outcome, gradients[len(own) :]
        leaves = [part.detach().requires_grad_() for part in received]
        joined = self._joiner([*own, *leaves])
        outcome = self.objective.step(joined.detach().requires_grad_(), labels)
        self.descend(joined, outcome.gradient)
        return outcome, [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in leaves
        ]

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
        """Return predictions for a part of a split.

        Parameters
        ----------
        split : str
            ``"train"``, ``"valid"`` or ``"test"``.
        index : int
            The part, from 0.
        embeddings : Mapping[str, Tensor]
            The embedding of each passive party.
        """
        rows = self.agreed().evaluation_rows(split, index)
        self._set_training(False)
        parts = self._received(embeddings, len(rows), self.step or None)
        with torch.no_grad(), self.random:
            own = [self.run_model(rows)] if self.model is not None else []
            return self.objective.predict(self._joiner([*own, *parts.values()]))

    def evaluate(
        self, split: str, index: int, embeddings: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Collect predictions for a part of a split; return metrics after the last.

        Parameters
        ----------
        split : str
            ``"train"``, ``"valid"`` or ``"test"``.
        index : int
            The part, from 0.
        embeddings : Mapping[str, Tensor]
            The embedding of each passive party.
        """
        predictions = self.predict(split, index, embeddings).cpu()
        self._scores = [predictions] if index == 0 else [*self._scores, predictions]
        schedule = self.agreed()
        if index + 1 < schedule.batches(split):
            return {}
        if len(self._scores) != index + 1 or self.raw_labels is None:
            raise PartyError(
                self.name,
                f"cannot evaluate: {len(self._scores)} of {index + 1} parts arrived",
                "Evaluate again from the first part, at a party that has labels",
            )
        labels = self.raw_labels[self._evaluated_rows(split).cpu()].double().numpy()
        scores, self._scores = torch.cat(self._scores).double().numpy(), []
        return METRICS[self.objective.task](scores, labels)

    def _evaluated_rows(self, split: str) -> Tensor:
        """Return the rows of a split in the order of its evaluation."""
        schedule = self.agreed()
        parts = range(schedule.batches(split))
        return torch.cat([schedule.evaluation_rows(split, i) for i in parts])

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
            "defense": self._guard.defender.state_dict(),
            "scores": self._scores,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Parameters
        ----------
        state : dict[str, Any]
            As :meth:`state_dict` returned it.
        """
        if self.model is not None:
            self.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self._joiner.load_state_dict(state["aggregation"])
        for optimizer, saved in zip(self.optimizers(), state["optimizer"], strict=True):
            optimizer.load_state_dict(saved)
        self.random.load_state_dict(state["random"])
        self._guard.defender.load_state_dict(state["defense"])
        self.step = state["step"]
        self._scores = state["scores"]
