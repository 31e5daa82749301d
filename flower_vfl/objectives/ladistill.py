"""LADSG: Label-Anonymized Distillation and Similar Gradient Substitution (Yan et al.).

https://arxiv.org/abs/2506.06742. Its label-anonymized distillation, and KDk: A Defense
Mechanism Against Label Inference Attacks in Vertical Federated Learning (Arazzi et
al.), https://arxiv.org/abs/2404.12369.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, check_name, require

from .base import OptimizerFactory, Outcome, descend, optimizers_of
from .cross_entropy import CrossEntropy

FirstEpoch = Literal["vanilla", "silent"]


def top_classes(logits: Tensor, k: int) -> Tensor:
    """Return the k most likely classes of a teacher, the likeliest first."""
    return logits.topk(k, dim=1).indices


def true_and_top_classes(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return the true class, then the k−1 most likely others of a teacher."""
    own = labels.long().unsqueeze(1)
    others = logits.scatter(1, own, -torch.inf)
    return torch.cat([own, top_classes(others, k - 1)], dim=1)


def anonymous_labels(ranked: Tensor, classes: int, eps: float) -> Tensor:
    """Return soft labels: 1−ε for the first class, ε/(k−1) for the others of k."""
    k = ranked.shape[1]
    weights = torch.full((k,), eps / (k - 1), device=ranked.device)
    weights[0] = 1.0 - eps
    soft = torch.zeros(len(ranked), classes, device=ranked.device)
    return soft.scatter(1, ranked.long(), weights.expand(len(ranked), k))


def train_teacher(
    teacher: nn.Module,
    inputs: Sequence[Tensor],
    labels: Tensor,
    epochs: int = 50,
    batch_size: int = 128,
    lr: float = 5e-3,
) -> None:
    """Train a teacher with Adam on hard labels.

    Parameters
    ----------
    teacher : nn.Module
        Called as ``teacher(*inputs)``; returns logits (B, C). A frozen teacher is not
        changed.
    inputs : Sequence[Tensor]
        One row per label.
    labels : Tensor
        Class numbers.
    epochs : int (default: 50)
        Passes over the rows, shuffled by torch's global generator.
    batch_size : int (default: 128)
        Rows of a batch; a last batch of one row is skipped.
    lr : float (default: 5e-3)
        Learning rate.

    Examples
    --------
    >>> from flower_vfl.objectives import train_teacher
    >>> features = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]])
    >>> teacher = nn.Linear(1, 2)
    >>> train_teacher(teacher, [features], torch.tensor([0, 0, 1, 1]), lr=0.5)
    >>> teacher(features).argmax(dim=1).tolist()
    [0, 0, 1, 1]
    """
    parameters = [p for p in teacher.parameters() if p.requires_grad]
    if not parameters:
        return
    optimizer = torch.optim.Adam(parameters, lr=lr)
    teacher.train()
    for _ in range(epochs):
        order = torch.randperm(len(labels)).to(labels.device)
        for rows in torch.split(order, batch_size):
            if len(rows) < 2 <= len(labels):  # too few for a batch norm
                continue
            logits = teacher(*(part.index_select(0, rows) for part in inputs))
            descend([optimizer], F.cross_entropy(logits, labels[rows].long()))
    optimizer.zero_grad()


@torch.no_grad()
def _teacher_logits(
    teacher: nn.Module, inputs: Sequence[Tensor], classes: int
) -> Tensor:
    """Return a teacher's logits of all rows."""
    teacher.eval()
    parts = zip(*(torch.split(part, 4096) for part in inputs), strict=True)
    logits = torch.cat([cast(Tensor, teacher(*part)) for part in parts])
    if logits.dim() != 2 or logits.shape[1] != classes:
        problem = f"as many columns, got the shape {tuple(logits.shape)}"
        raise ConfigError(f"a teacher for {classes} classes must return {problem}")
    return logits


class LADistill(CrossEntropy):
    """Label-anonymized distillation, the objective of LADSG (Yan et al.).

    Cross entropy against soft labels of a teacher. The class that the teacher finds
    most likely has the weight 1−ε, the next k−1 have ε/(k−1) each, the others 0.

    The teacher is trained on the label party's own features, before the first step. A
    label party without features trains it on the embeddings of the first epoch, and
    soft labels start in the second epoch. In a first epoch of plain cross entropy the
    passive parties receive gradients of the true labels, once for every row: use
    `first_epoch="silent"`, or a gradient transform, if that matters.

    Parameters
    ----------
    top : nn.Module
        Takes the joined embedding and returns logits, as for :class:`CrossEntropy`.
    teacher : nn.Module
        Called with the label party's features, or with the joined embeddings if it has
        none. Returns one logit per class, also for two classes. A frozen teacher is not
        trained.
    classes : int (default: 2)
        Number of classes.
    k : int (default: 2)
        Number of classes with a weight above 0; 2 for binary tasks.
    eps : float (default: 0.3)
        ε, the total weight of all classes but the first.
    first_epoch : {"vanilla", "silent"} (default: "vanilla")
        The first epoch of a label party without features. ``"vanilla"`` is the paper's:
        cross entropy on the labels. ``"silent"`` (ours) sends zeros to the parties, so
        the teacher learns from the embeddings of untrained models.
    teacher_epochs : int (default: 50)
        Epochs of the teacher's training.
    teacher_batch : int (default: 128)
        Rows of its batches.
    teacher_lr : float (default: 5e-3)
        Learning rate of its Adam.
    balanced : bool (default: False)
        Our extension for rare classes: whether the teacher's probabilities are divided
        by the classes' shares of the training rows. Otherwise a class of 5 % is hardly
        ever the likeliest, and all soft labels are the same.
    on_embeddings : bool (default: False)
        Whether the teacher is trained on the embeddings of the first epoch although the
        label party has features, which may tell less than those of all parties.

    Examples
    --------
    >>> from flower_vfl.objectives import LADistill
    >>> objective = LADistill(nn.Linear(8, 4), nn.Linear(5, 4), classes=4, k=3, eps=0.3)
    >>> objective.soft_labels(torch.tensor([[2, 0, 1]]))
    tensor([[0.1500, 0.1500, 0.7000, 0.0000]])
    """

    takes_shares: ClassVar[bool] = False
    calibrates: ClassVar[bool] = False
    by_row: ClassVar[bool] = True
    label_losses: ClassVar[tuple[str, ...]] = ("plain",)

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
        balanced: bool = False,
        on_embeddings: bool = False,
    ) -> None:
        super().__init__(top, classes)
        allowed = f"from 2 to the number of classes, {classes}"
        require(2 <= k <= classes, "k", allowed, k)
        require(0.0 <= eps < 1.0, "eps", "at least 0 and below 1", eps)
        check_name("first epoch", first_epoch, ("vanilla", "silent"))
        if teacher_epochs < 1 or teacher_batch < 2 or not teacher_lr > 0.0:
            raise ConfigError(
                "a teacher needs at least 1 epoch, batches of 2 rows and a learning "
                f"rate above 0; got {teacher_epochs}, {teacher_batch}, {teacher_lr}"
            )
        self.teacher = teacher
        self.k, self.eps, self.on_embeddings = k, eps, on_embeddings
        self.first_epoch: FirstEpoch = first_epoch
        self.teacher_epochs, self.teacher_batch = teacher_epochs, teacher_batch
        self.teacher_lr, self.balanced = teacher_lr, balanced
        self._features: tuple[Tensor, ...] = ()
        self._labels: Tensor | None = None
        self._training: Tensor | None = None
        # Row numbers and embeddings of each batch of the first epoch.
        self._seen: list[tuple[Tensor, Tensor]] = []
        # The teacher's k classes of each row; None before it is trained.
        self._ranked: Tensor | None = None

    def configure(self, make: OptimizerFactory) -> None:
        """Create the top model's optimizer."""
        self.optimizers = optimizers_of(self.top, make)

    def prepare(
        self, features: Sequence[Tensor], labels: Tensor, training: Tensor
    ) -> None:
        """Store the data that the teacher is trained on; forget an earlier teacher."""
        self._features = () if self.on_embeddings else tuple(features)
        self._labels, self._training = labels, training
        self._seen, self._ranked = [], None

    def rank(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the k classes (B, k) of each soft label, the first one first."""
        return top_classes(logits, self.k)

    def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
        """Train the top model on soft labels and return the embedding's gradient."""
        if self.rows is None or self._labels is None:
            problem = f"{type(self).__name__} must know which rows a batch has"
            raise ConfigError(f"{problem}: call prepare() and set its rows")
        if self._ranked is None and not self._ready(self.rows):
            self._seen.append((self.rows.clone(), embedding.detach().clone()))
            outcome = super().step(embedding, labels)
            if self.first_epoch == "silent":
                outcome.gradient = torch.zeros_like(outcome.gradient)
            return outcome
        ranked = self._all_ranked()[self.rows].long()
        outcome = super().step(embedding, self.soft_labels(ranked))
        agree = (ranked[:, 0] == labels).double().mean()
        outcome.metrics["teacher_agreement"] = float(agree)
        return outcome

    def soft_labels(self, ranked: Tensor) -> Tensor:
        """Return soft labels for ranked classes (B, k)."""
        soft = anonymous_labels(ranked, self.classes, self.eps)
        return soft[:, 1] if self.task == "binary" else soft

    def _ready(self, rows: Tensor) -> bool:
        """Return whether all data to train the teacher has arrived."""
        if self._features:
            return True
        # The second epoch starts when a row comes again.
        return any(bool((seen == rows[0]).any()) for seen, _ in self._seen)

    def _all_ranked(self) -> Tensor:
        """Return the ranked classes of every row; train the teacher first if needed."""
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
        settings = self.teacher_epochs, self.teacher_batch, self.teacher_lr
        train_teacher(self.teacher, inputs, labels, *settings)
        logits = _teacher_logits(self.teacher, inputs, self.classes)
        if self.balanced:
            logits -= labels.bincount(minlength=self.classes).clamp_min(1).log()
        self.teacher.train(was_training)
        shape = len(self._labels), self.k
        ranked = torch.zeros(shape, dtype=torch.int32, device=rows.device)
        ranked[rows] = self.rank(logits, labels).int()
        self._seen, self._ranked = [], ranked
        return ranked

    def get_extra_state(self) -> dict[str, Any]:
        """Return the stored embeddings and the teacher's ranking."""
        ranked = {} if self._ranked is None else {"ranked": self._ranked}
        return {"seen": [list(batch) for batch in self._seen], **ranked}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        device = None if self._labels is None else self._labels.device
        self._seen = [(r.to(device), part.to(device)) for r, part in state["seen"]]
        ranked = state.get("ranked")
        self._ranked = None if ranked is None else ranked.to(device)


class KDk(LADistill):
    """KDk (Arazzi et al.): as LADistill, with the true class first.

    The true class has the weight 1−ε, and the k−1 other classes that the teacher finds
    most likely have ε/(k−1) each. Parameters are those of :class:`LADistill`.

    Examples
    --------
    >>> from flower_vfl.objectives import KDk
    >>> objective = KDk(nn.Linear(8, 4), nn.Linear(5, 4), classes=4, k=2)
    >>> objective.rank(torch.tensor([[0.1, 3.0, 2.0, -1.0]]), torch.tensor([3]))
    tensor([[3, 1]])
    """

    def rank(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the k classes (B, k) of each soft label, the true one first."""
        return true_and_top_classes(logits, labels, self.k)
