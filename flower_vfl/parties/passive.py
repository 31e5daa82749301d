"""The passive party: features and a bottom model, no labels."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_vfl.errors import PartyError
from flower_vfl.leakage.attacks.spectral import membership_aucs, with_labels
from flower_vfl.leakage.meter import LayerProbe
from flower_vfl.objectives import OptimizerFactory, Task, clear_gradients
from flower_vfl.parties.imputation.row_index import Imputation
from flower_vfl.protocol.config import PartyDescription, TrainingConfig
from flower_vfl.rows import check_finite

from .base import Features, Party, default_optimizer


@dataclass
class _Pending:
    """A forward pass that waits for its gradient; no output: to be computed again."""

    step: int
    epoch: int
    index: int
    output: Tensor | None
    random: list[Tensor]
    buffers: dict[str, Tensor]
    probe: LayerProbe | None = None


class PassiveParty(Party):
    """A party that holds features and trains a bottom model on the gradients it gets.

    Parameters
    ----------
    features : Features
        One row per sample: a tensor, an array or several.
    model : nn.Module
        Bottom model; called as ``model(*features_of_the_batch)``. Its output is the cut
        layer and may have any number of dimensions after the first.
    optimizer : OptimizerFactory (default: Adam with lr 1e-3)
        Takes the parameters and returns an optimizer, for example
        ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``.
    name : str | None (default: None)
        Name in messages and errors; None takes it from the node.
    ids : Sequence[object] | NDArray[Any] | None (default: None)
        One id per row. They never leave the party; a keyed digest shows whether all
        parties have the same ids in the same order.
    split : NDArray[np.int8] | None (default: None)
        ``TRAIN``, ``VALID`` or ``TEST`` per row; None lets the strategy's fractions
        decide.
    device : str | torch.device (default: "auto")
        Where it computes; ``"auto"`` takes a GPU where there is one.
    imputation : Imputation (default: Imputation())
        What stands in for rows that it lacks, where a union of ids is trained on.

    Examples
    --------
    >>> import torch
    >>> from flower_vfl import PassiveParty
    >>> party = PassiveParty(torch.randn(100, 6), torch.nn.Linear(6, 4), name="bank")
    >>> party.rows
    100
    """

    role = "passive"

    def __init__(
        self,
        features: Features,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory = default_optimizer,
        name: str | None = None,
        ids: Sequence[object] | NDArray[Any] | None = None,
        split: NDArray[np.int8] | None = None,
        device: str | torch.device = "auto",
        imputation: Imputation | None = None,
    ) -> None:
        given = (features, model, optimizer, name, ids, split, device)
        super().__init__(*given, imputation or Imputation())
        self.model: nn.Module = model
        self._pending: _Pending | None = None
        self._trained: tuple[Tensor, Tensor] | None = None  # rows, their embeddings
        self.questions: Sequence[int] | Tensor = ()  # see flower_vfl.protocol.serving
        self.answers = torch.empty(0)
        self._buffers = [  # where they are, for a model may put new ones in their place
            (f"{path}.{key}".lstrip("."), module, key)
            for path, module in model.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
            if buffer is not None
        ]

    @property
    def own_rows(self) -> int:
        """Number of samples that it holds."""
        return len(self.features[0]) if self.features else 0

    def describe(self, key: bytes) -> PartyDescription:
        """Return what the party says about itself before a run."""
        self.check_data()
        shape = self.probe_shape()
        ids, split = self.digests(key)
        return PartyDescription(self.name, "passive", self.rows, shape, "", ids, split)

    def configure(self, config: TrainingConfig) -> None:
        """Take over the settings of a run and get ready for step 1."""
        super().configure(config)
        self._pending = None

    def forward(
        self, step: int, epoch: int, index: int, probed: bool = False
    ) -> Tensor:
        """Return the embedding of a training batch and wait for its gradient.

        With `probed`, the gradients of all layers are kept for :meth:`backward`.
        """
        rows = self.training_rows(step, epoch, index)
        random = self.random.states
        buffers = {name: getattr(m, key).clone() for name, m, key in self._buffers}
        probe = LayerProbe(self.model) if probed else None
        if not self.model.training:
            self.model.train()
        with self.random, probe or nullcontext():
            output = self.embed_rows(rows, ("train", step), True)
        self._pending = _Pending(step, epoch, index, output, random, buffers, probe)
        return output.detach()

    def backward(
        self, step: int, gradient: Tensor | None, probed: bool = False
    ) -> dict[str, Tensor]:
        """Train the bottom model on the gradient of the batch that is waiting.

        None, a gradient that a defense withheld, leaves the model as it is. With
        `probed`, the gradient of the output of every layer is returned.
        """
        pending = self._pending
        if pending is None or pending.step != step:
            waits = f"step {pending.step}" if pending else "no gradient"
            raise PartyError(
                self.name,
                f"got the gradient of step {step} but expects {waits}",
                "Restore all parties to one checkpoint",
                step,
            )
        if pending.output is None:  # the graph did not survive: repeat the forward pass
            self.forward(pending.step, pending.epoch, pending.index, probed)
            pending = self._pending
        assert pending is not None and pending.output is not None  # just computed
        output, probe = pending.output, pending.probe
        if gradient is not None:
            if gradient.shape != output.shape:
                raise PartyError(
                    self.name,
                    f"got a gradient of shape {tuple(gradient.shape)} for an embedding "
                    f"of shape {tuple(output.shape)}",
                    "The label party and every gradient transform must keep the shape",
                    step,
                )
            remedy = "Lower the learning rate, or check the defense that made it"
            check_finite(gradient, self.name, "the gradient it received", remedy, step)
            if self.optimizer is not None and output.requires_grad:
                clear_gradients(self.optimizer)
                gradient = gradient.to(self.device)
                output.backward(gradient)  # type: ignore[no-untyped-call]
                self.optimizer.step()
        if self.imputer.row_index is not None:
            self.imputer.commit()
            rows = self.training_rows(step, pending.epoch, pending.index)
            self._trained = rows, output.detach()
        self._pending = None
        self.step = step
        return {} if probe is None else probe.gradients

    def membership(self, labels: Tensor | None, task: Task) -> dict[str, float]:
        """Return how well the last batch hid which rows this party does not hold.

        The AUC of the spectral attack by kind; nothing where the batch has no missing
        rows, or only missing ones. Labels are joined to the embeddings if given.
        """
        if self._trained is None:
            return {}
        rows, embedding = self._trained
        real = self.imputer.local[rows] >= 0
        return membership_aucs(with_labels(embedding, labels, task), real)

    def embed(self, split: str, index: int) -> Tensor:
        """Return the embedding of a part of a split, in evaluation mode."""
        rows = self.configured().evaluation_rows(split, index)
        return self.embed_for_use(rows, (split, index))

    def embed_for_use(
        self, rows: Tensor, at: tuple[int | str, ...] | None = None
    ) -> Tensor:
        """Return the embedding of rows of the run, or of own rows without `at`."""
        if self.model.training:
            self.model.eval()
        with torch.no_grad(), self.random:
            if at is None:
                return self.run_model(rows)
            return self.embed_rows(rows, at, False)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training changes, as of the last completed step."""
        model, random = self.model.state_dict(), self.random.state_dict()
        waiting: list[int] = []
        if self._pending is not None:
            pending = self._pending
            waiting = [pending.step, pending.epoch, pending.index]
            random = {f"generator{i}": state for i, state in enumerate(pending.random)}
            model.update({k: v for k, v in pending.buffers.items() if k in model})
        return {
            "role": self.role,
            "step": self.step,
            "model": model,
            "optimizer": [o.state_dict() for o in self.optimizers()],
            "random": random,
            "waiting": waiting,
            **self.imputer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers(), state["optimizer"], strict=True):
            optimizer.load_state_dict(saved)
        self.random.load_state_dict(state["random"])
        self.imputer.load_state_dict(state, embeds=True)
        self.step = state["step"]
        self._pending = None
        if state["waiting"]:
            step, epoch, index = state["waiting"]
            self._pending = _Pending(step, epoch, index, None, self.random.states, {})
