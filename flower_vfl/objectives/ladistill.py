"""LADistill and KDk: labels that a teacher softened and k-anonymity blurred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, unknown_name

from .base import OptimizerFactory, Outcome
from .cross_entropy import CrossEntropy
from .teacher import (
    anonymous_labels,
    teacher_logits,
    top_classes,
    train_teacher,
    true_and_top_classes,
)

FirstEpoch = Literal["vanilla", "silent"]


class LADistill(CrossEntropy):
    """Label-anonymized distillation, the objective of LADSG (Yan et al.).

    Cross entropy not against the labels but against a teacher's. Of the classes that
    the teacher finds most likely, the first gets the weight 1−ε, the next k−1 get
    ε/(k−1) each, and the rest nothing.

    The teacher is trained only on what the label party holds: before the first step on
    its own features, if it has any. If it has none, the first epoch is one without the
    objective's protection, the teacher is trained on the embeddings that the parties
    sent in it, and soft labels begin with the second epoch. A first epoch of plain
    cross entropy shows the passive parties gradients of the true labels, every row
    once: use `first_epoch`, or a defense of gradients, if that matters.

    The teacher's ranking of the training rows is kept, and the teacher not asked again.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns logits, as for :class:`CrossEntropy`.
    teacher : nn.Module
        Called with the label party's features, or with the joined embedding of a row if
        it has none; returns one logit per class, also for two classes. One whose
        parameters are frozen is used as it is.
    classes : int (default: 2)
        Number of classes.
    k : int (default: 2)
        How many classes share a label; 2 for binary tasks.
    eps : float (default: 0.3)
        ε, what the first class gives away.
    first_epoch : {"vanilla", "silent"} (default: "vanilla")
        Without features: what the first epoch is. ``"vanilla"`` is the method's: cross
        entropy on the labels. ``"silent"`` (ours) lets the parties receive zeros, so
        that the teacher learns from the embeddings of untrained models.
    teacher_epochs : int (default: 50)
        Passes of the teacher's training.
    teacher_batch : int (default: 128)
        Rows of its batches.
    teacher_lr : float (default: 5e-3)
        Learning rate of its Adam.
    """

    takes_shares: ClassVar[bool] = False
    calibrates: ClassVar[bool] = False
    by_row: ClassVar[bool] = True

    def __init__(
        self,
        top: nn.Module,
        teacher: nn.Module,
        classes: int = 2,
        k: int = 2,
        eps: float = 0.3,
        first_epoch: FirstEpoch = "vanilla",
        teacher_epochs: int = 50,
        teacher_batch: int = 128,
        teacher_lr: float = 5e-3,
    ) -> None:
        super().__init__(top, classes)
        if not 2 <= k <= classes:
            raise ConfigError(
                f"k must be from 2 to the number of classes, {classes}; got {k}"
            )
        if not 0.0 <= eps < 1.0:
            raise ConfigError(f"eps must be at least 0 and below 1, got {eps}")
        if first_epoch not in ("vanilla", "silent"):
            raise unknown_name("first epoch", first_epoch, ("vanilla", "silent"))
        if teacher_epochs < 1 or teacher_batch < 2 or not teacher_lr > 0.0:
            raise ConfigError(
                "a teacher needs at least 1 epoch, batches of 2 rows and a learning "
                f"rate above 0; got {teacher_epochs}, {teacher_batch}, {teacher_lr}"
            )
        self.teacher = teacher
        self.k, self.eps = k, eps
        self.first_epoch: FirstEpoch = first_epoch
        self.teacher_epochs, self.teacher_batch = teacher_epochs, teacher_batch
        self.teacher_lr = teacher_lr
        self._features: tuple[Tensor, ...] = ()
        self._labels: Tensor | None = None
        self._training: Tensor | None = None
        # What the first epoch brought: row numbers and embeddings of each batch.
        self._seen: list[tuple[Tensor, Tensor]] = []
        # By row number, once the teacher is trained: k classes, the first one first.
        self._ranked: Tensor | None = None

    def configure(self, make: OptimizerFactory) -> None:
        """Create the top model's optimizer; the teacher has one while it is trained."""
        parameters = [p for p in self.top.parameters() if p.requires_grad]
        self.optimizers = [make(parameters)] if parameters else []

    def prepare(
        self, features: Sequence[Tensor], labels: Tensor, training: Tensor
    ) -> None:
        """Keep what the teacher is to be trained on; begin anew."""
        self._features, self._labels = tuple(features), labels
        self._training = training
        self._seen, self._ranked = [], None

    def rank(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the classes (B, k) that share each label, the first one first."""
        return top_classes(logits, self.k)

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train the top model on soft labels and return the embedding's gradient."""
        if self.rows is None or self._labels is None:
            raise ConfigError(
                f"{type(self).__name__} has to know which rows a batch has: call "
                "prepare() and set its rows, as LabelParty does"
            )
        if self._ranked is None and not self._ready():
            return self._first_step(embedding, labels)
        ranked = self._all_ranked()[self.rows].long()
        outcome = super().step(embedding, self.soft_labels(ranked))
        agree = (ranked[:, 0] == labels).double().mean()
        outcome.metrics["teacher_agreement"] = float(agree)
        return outcome

    def soft_labels(self, ranked: Tensor) -> Tensor:
        """Return what the cross entropy is taken against."""
        soft = anonymous_labels(ranked, self.classes, self.eps)
        return soft[:, 1] if self.task == "binary" else soft

    def _ready(self) -> bool:
        """Say whether there is all that the teacher is to be trained on."""
        if self._features:
            return True
        assert self.rows is not None  # the caller looked
        # A row that comes again begins the second epoch.
        return any(bool((rows == self.rows[0]).any()) for rows, _ in self._seen)

    def _first_step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Take a step of the first epoch and keep its embeddings."""
        assert self.rows is not None  # the caller looked
        self._seen.append((self.rows.clone(), embedding.detach().clone()))
        outcome = super().step(embedding, labels)
        if self.first_epoch == "silent":
            outcome.gradient = torch.zeros_like(outcome.gradient)
        return outcome

    def _all_ranked(self) -> Tensor:
        """Return the classes of every row, after training the teacher if need be."""
        if self._ranked is not None:
            return self._ranked
        assert self._labels is not None and self._training is not None
        rows, inputs = self._training, [part[self._training] for part in self._features]
        if not inputs:
            rows = torch.cat([numbers for numbers, _ in self._seen])
            inputs = [torch.cat([part for _, part in self._seen])]
        labels = self._labels[rows].long()
        was_training = self.teacher.training
        self.teacher.to(rows.device)
        train_teacher(
            self.teacher,
            inputs,
            labels,
            self.teacher_epochs,
            self.teacher_batch,
            self.teacher_lr,
        )
        logits = teacher_logits(self.teacher, inputs, self.classes)
        self.teacher.train(was_training)
        ranked = torch.zeros(
            len(self._labels), self.k, dtype=torch.int32, device=rows.device
        )
        ranked[rows] = self.rank(logits, labels).int()
        self._seen, self._ranked = [], ranked
        return ranked

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy against hard or soft labels."""
        if labels.dim() == 2:
            log_shares = F.log_softmax(self._logits(output), dim=1)
            return -(labels * log_shares).sum(dim=1).mean()
        return super().loss(output, labels)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the first epoch brought and the teacher's ranking."""
        ranked = {} if self._ranked is None else {"ranked": self._ranked}
        return {"seen": [list(batch) for batch in self._seen], **ranked}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        device = None if self._labels is None else self._labels.device
        self._seen = [(r.to(device), part.to(device)) for r, part in state["seen"]]
        ranked = state.get("ranked")
        self._ranked = None if ranked is None else ranked.to(device)


class KDk(LADistill):
    """KDk: as LADistill, with the true class first.

    The true class has the weight 1−ε; the k−1 other classes that the teacher finds
    most likely have ε/(k−1) each. So a row sums to 1 also where the true class is not
    among the teacher's k likeliest.

    Parameters
    ----------
    top, teacher, classes, k, eps, first_epoch
        As for :class:`LADistill`.
    teacher_epochs, teacher_batch, teacher_lr
        As for :class:`LADistill`.
    """

    def rank(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the classes (B, k) that share each label, the true one first."""
        return true_and_top_classes(logits, labels, self.k)
