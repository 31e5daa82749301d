"""The label party: labels, an objective, and perhaps features of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError, PartyError, at_party
from flower_vfl.metrics import Evaluation
from flower_vfl.objectives import Objective, OptimizerFactory, Outcome
from flower_vfl.parties.imputation.label_imputer import BatchLabels, LabelImputer
from flower_vfl.parties.imputation.row_index import Imputation
from flower_vfl.privacy.label_privacy import LabelPrivacy
from flower_vfl.privacy.private_labels import PrivateLabels
from flower_vfl.protocol.codecs import build_codec
from flower_vfl.protocol.config import PartyDescription, Shape, TrainingConfig
from flower_vfl.randomness import Noise, tensor_digest
from flower_vfl.records import Measurement
from flower_vfl.rows import received_embeddings
from flower_vfl.transform import Defender, GradientTransform, Seen

from .aggregation import LINEAR, Aggregation, labels_remedy, one_choice, try_shapes
from .base import ArrayLike, Features, LabelStep, Party, as_tensors, default_optimizer
from .local_updates import CachedBatch, check_objective, update_label
from .policies import DefenseFactory, DefensePolicy
from .schedule import plain_list

_REMEDY = "Correct its label privacy"


class LabelParty(Party):
    """The party that holds the labels and turns embeddings into gradients.

    Parameters
    ----------
    labels : ArrayLike | None
        One label per row: 0/1, class numbers or values; None to predict only.
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
    name, ids, split, device, imputation
        As for :class:`PassiveParty`.
    rows : int | None (default: None)
        Number of rows, for a party without labels and features.
    trust_server : bool (default: False)
        Whether raw gradients, and labels, may be handed to a defense that runs at the
        strategy, and whether the strategy may decide what noise is drawn from.
    defense : GradientTransform | None (default: None)
        A defense of its own, applied before anything leaves, whatever a strategy says.
    label_privacy : LabelPrivacy | None (default: None)
        Randomise every label once, for a bound that holds for the whole training.
    build_defense : Callable[[str], GradientTransform] | None (default: None)
        Builds the defense that the strategy names for this node, usually
        ``flower_vfl.strategies.build_defense``.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl import CrossEntropy, LabelParty
    >>> labels = torch.tensor([0, 1, 1, 0])
    >>> party = LabelParty(labels, CrossEntropy(torch.nn.Linear(4, 1)))
    >>> party.rows
    4
    """

    role = "label"

    def __init__(
        self,
        labels: ArrayLike | None,
        objective: Objective,
        *,
        features: Features | None = None,
        model: nn.Module | None = None,
        aggregation: str | nn.Module | None = None,
        optimizer: OptimizerFactory = default_optimizer,
        name: str | None = None,
        ids: Sequence[object] | NDArray[Any] | None = None,
        split: NDArray[np.int8] | None = None,
        device: str | torch.device = "auto",
        imputation: Imputation | None = None,
        rows: int | None = None,
        trust_server: bool = False,
        defense: GradientTransform | None = None,
        label_privacy: LabelPrivacy | None = None,
        build_defense: DefenseFactory | None = None,
    ) -> None:
        if (features is None) != (model is None):
            one = "features without a bottom model, or a bottom model without features"
            raise ConfigError(f"a label party has {one}: give both or neither")
        imputation = imputation or Imputation()
        given = (features, model, optimizer, name, ids, split, device)
        super().__init__(*given, imputation)
        if labels is not None and not isinstance(labels, Tensor):
            labels = np.asarray(labels)
        self.raw_labels = None if labels is None else as_tensors(labels)[0]
        self.objective = objective.to(self.device)
        self._own_aggregation = aggregation
        self._joiner = Aggregation(aggregation or "concat").to(self.device)
        self.trust_server = trust_server
        self.protects = objective.hides or defense is not None
        self.defense_policy = DefensePolicy(defense, build_defense)
        self.defender = Defender()
        self.secret = 0  # key of all that hides labels; drawn for every run
        self._rows = rows
        self._labels: Tensor | None = None  # those that training sees
        self.label_privacy = label_privacy
        self.private: PrivateLabels | None = None
        self._shapes: dict[str, Shape] = {}
        self._evaluation = Evaluation()
        self._label_imputer = LabelImputer(self.imputer, imputation)

    @property
    def own_rows(self) -> int:
        """Number of samples that it holds."""
        if self.raw_labels is not None:
            return len(self.raw_labels)
        return super().own_rows or self._rows or 0

    def describe(self, key: bytes) -> PartyDescription:
        """Return what the party says about itself before a run."""
        if self.features and super().own_rows != self.own_rows:
            rows = f"{super().own_rows} rows of features"
            problem = f"has {rows} and {self.own_rows} labels"
            raise PartyError(self.name, problem, "Give one label per row of features")
        if self.raw_labels is not None and self.private is None:
            remedy = labels_remedy(self.raw_labels, self.objective)
            with at_party(self.name, remedy):
                labels = self.objective.encode(self.raw_labels).to(self.device)
            if self.label_privacy is not None:
                named = range(self.own_rows) if self.ids is None else self.ids
                given = self.label_privacy, self.objective, labels, plain_list(named)
                with at_party(self.name, _REMEDY):
                    self.private = PrivateLabels(*given)
            # Last, and once: no hello, even one that fails, brings true labels back.
            self._labels = labels
        told = replace(super().describe(key), task=self.objective.task)
        if self.private is not None:
            with at_party(self.name, _REMEDY):
                told = self.private.describe(told)
        return told

    def configure(self, config: TrainingConfig) -> None:
        """Take over the settings of a run and check that the embeddings fit."""
        chosen = one_choice(self._own_aggregation, config.aggregation, self.name)
        if isinstance(chosen, str):
            self._joiner = Aggregation(chosen)
        self._shapes = dict(config.parties)
        self.codec = build_codec(config.compress_embeddings)
        with at_party(self.name, "Correct this setting"):
            check_objective(self.objective, config)
        self.objective.configure(self.make_optimizer)
        given = config, self.name, self.objective, self.trust_server, bool(self.private)
        self.defender, self.secret = self.defense_policy.prepare(*given)
        super().configure(config)
        if self.private is not None:
            with at_party(self.name, _REMEDY):
                self.private.check_run(config, self.defender)
            self.choose_loss("", self.private.own_key(self.secret, self.trust_server))
        else:
            self._fit_labels()
        shape = self.probe_shape()
        shapes = ({self.name: shape} if shape else {}) | dict(config.parties)
        with self.random:
            try_shapes(self._joiner, self.objective, shapes, self.name, self.device)

    def _fit_labels(self) -> None:
        """Fit all that learns from labels before the first step."""
        training = self.configured().rows("train")
        if self._labels is not None and len(training):
            given = self._labels, training, self.objective, self._shapes, self.name
            self._label_imputer.fit(*given)
            known, _ = self._label_imputer.labelled(training)
            self.objective.prepare(self.features, self._labels, known)

    def choose_loss(self, loss: str, key: int | None = None) -> None:
        """Draw the labels that training sees, and learn them with a loss."""
        private = self.private
        assert private is not None
        rows = self.configured().rows("train")
        own, held = self._label_imputer.labelled(rows)
        gaps, known = len(own) < len(rows), rows if held is None else rows[held]
        with at_party(self.name, _REMEDY):
            private.draw(private.key if key is None else key, own, known)
            self._labels = private.used
            self._fit_labels()
            private.choose(loss or private.privacy.loss, gaps)
        if self.defender.monitor is not None:
            self.defender.monitor.canaries = private.canaries

    def training_seed(self, config: TrainingConfig) -> int | Noise:
        """Return what dropout and the like are drawn from."""
        known = super().training_seed(config)
        return Noise(self.secret, "training") if self.secret else known

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this party's own optimizer."""
        return super().trained_parameters() + list(self._joiner.parameters())

    def optimizers(self) -> list[Optimizer]:
        """Return every optimizer of this party."""
        return super().optimizers() + self.objective.optimizers

    def train_step(
        self,
        step: int,
        epoch: int,
        index: int,
        embeddings: Mapping[str, Tensor],
        late: bool = False,
    ) -> LabelStep:
        """Train on one batch and return a gradient for each passive party.

        With `late`, what the gradients leak may be reported with one of the next steps.
        """
        self._set_training(True)
        rows = self.training_rows(step, epoch, index)
        if self._labels is None:
            raise PartyError(self.name, "has no labels", "Give labels to train", step)
        known = embeddings, self._shapes, len(rows), self.device, self.codec
        received = received_embeddings(*known, step)
        parts = list(received.values())
        with self.random:
            own = []
            if self.model is not None:
                own = [self.embed_rows(rows, ("step", step), True)]
            if self.imputer.row_index is None:
                found = self._labels.index_select(0, rows)
                labels = BatchLabels(found, found)
                self.objective.rows = rows
            else:
                self.objective.rows = self.imputer.local[rows]
                made = step, own + parts, self._joiner, self.objective
                labels = self._label_imputer.batch(rows, *made)
            if self.private is not None:
                labels = self.private.batch(labels, self.objective.rows)
            if self.objective.hides:
                digests = [tensor_digest(part, self.secret, step) for part in parts]
                self.objective.noise = Noise(self.secret, "objective", step, *digests)
            if self._joiner.name in LINEAR:
                outcome, gradients = self._train_linear(own, parts, labels.used)
            else:
                outcome, gradients = self._train_module(own, parts, labels.used)
        loss = outcome.loss.item()
        if not math.isfinite(loss):  # which of the two it is depends on labels
            remedy = "Lower the learning rate or check the loss of the last steps"
            raise PartyError(self.name, "its loss is NaN or infinite", remedy, step)
        self.step = step
        if self.imputer.row_index is not None:
            self.imputer.synthesizer.commit()
        leaving = clean = dict(zip(received, gradients, strict=True))
        measured: list[Measurement] = []
        if not self.defender.idle:
            given, seen = (leaving, labels.classes, step, epoch), Seen(received, rows)
            real, true, last = labels.real, labels.true, index + 1 == len(self._batches)
            leaving, measured = self.defender.defend(
                *given, real=real, seen=seen, last=last, late=late, true_labels=true
            )
        if self.cache is not None:
            kept = CachedBatch(step, rows, parts, gradients, labels.used)
            update_label(self, self._joiner, self.objective, self.cache, kept)
        told = outcome.metrics, labels.classes, measured, clean
        return LabelStep(leaving, loss, len(rows), *told)

    def _train_linear(
        self, own: list[Tensor], received: list[Tensor], labels: Tensor
    ) -> tuple[Outcome, list[Tensor]]:
        """Train where the gradient of each part follows without autograd."""
        parts = own + received
        joined = LINEAR[self._joiner.name]([part.detach() for part in parts])
        outcome = self.objective.step(joined.detach().requires_grad_(), labels)
        gradient = outcome.gradient
        if self._joiner.name == "concat":
            widths = [part.shape[1] for part in parts]
            gradients = list(torch.split(gradient, widths, 1))
        else:
            mean = self._joiner.name == "mean"
            gradients = [gradient / len(parts) if mean else gradient] * len(parts)
        if own and own[0].requires_grad:
            self.descend(own[0], gradients[0])
        return outcome, gradients[len(own) :]

    def _train_module(
        self, own: list[Tensor], received: list[Tensor], labels: Tensor
    ) -> tuple[Outcome, list[Tensor]]:
        """Train where autograd finds the gradient of each part."""
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

    def predict(
        self, split: str, index: int, embeddings: Mapping[str, Tensor]
    ) -> Tensor:
        """Return predictions for a part of a split."""
        rows = self.configured().evaluation_rows(split, index)
        return self.predict_rows(rows, (split, index), embeddings)

    def predict_rows(
        self, rows: Tensor, at: tuple[int | str, ...], embeddings: Mapping[str, Tensor]
    ) -> Tensor:
        """Return predictions for some rows."""
        self._set_training(False)
        known = embeddings, self._shapes, len(rows), self.device, self.codec
        parts = received_embeddings(*known, self.step or None)
        with torch.no_grad(), self.random:
            embedded = list(parts.values())
            if self.model is not None:
                embedded.insert(0, self.embed_rows(rows, at, False))
            return self.objective.predict(self._joiner(embedded))

    def evaluate(
        self, split: str, index: int, embeddings: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Collect predictions for a part of a split; return metrics after the last."""
        self._evaluation.add(index, self.predict(split, index, embeddings))
        schedule = self.configured()
        parts = schedule.batches(split)
        if index + 1 < parts:
            return {}
        if self.raw_labels is None:
            raise PartyError(self.name, "has no labels", "Give labels to evaluate")
        own, labelled = self._label_imputer.labelled(schedule.rows(split))
        labels, shares = self.raw_labels[own.cpu()], None
        if self.private is not None and split == "valid":  # it decides about training
            labels, shares = self.private.validation(own)
        given = labels, labelled, self.objective.task, self.name, split, shares
        return self._evaluation.finish(parts, *given)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training changes, as of the last completed step."""
        return {
            **super().state_dict(),
            "objective": self.objective.state_dict(),
            "aggregation": self._joiner.state_dict(),
            "defense": self.defender.state_dict(),
            "secret": f"{self.secret:x}",
            "scores": self._evaluation.scores,
            **({} if self.private is None else self.private.state_dict()),
            **self._label_imputer.state_dict(self.objective),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if self.private is not None:
            with at_party(self.name, _REMEDY):
                self.choose_loss(*self.private.saved(state))
        elif state.get("label_draws") and self._labels is not None:
            problem = "the resumed run had randomised labels"
            raise PartyError(self.name, problem, _REMEDY)
        super().load_state_dict(state)
        self.objective.load_state_dict(state["objective"])
        self._joiner.load_state_dict(state["aggregation"])
        self.defender.load_state_dict(state["defense"])
        self.secret = int(state["secret"], 16)
        self._evaluation = Evaluation(state["scores"])
        self._label_imputer.load_state_dict(state, self.objective)
