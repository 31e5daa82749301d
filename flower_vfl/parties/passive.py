"""The passive party: features and a bottom model, no labels.

In a pipelined run several forward passes wait for their gradients while the optimizer
changes the weights. Each pass is computed with a copy of the weights and differentiated
with respect to it (weight stashing; PipeDream, https://arxiv.org/abs/1806.03377). The
copy predicts the weights that the gradient will meet: the present ones, plus the last
update for each waiting pass (SpecTrain, https://arxiv.org/abs/1809.02839).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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
from flower_vfl.protocol.codecs import Encoder, build_codec, build_encoder
from flower_vfl.protocol.config import Shape, TrainingConfig
from flower_vfl.rows import check_finite

from .base import Features, Party, default_optimizer
from .local_updates import CachedBatch, update_passive

_RESTORE = "Restore all parties to one checkpoint"


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
    weights: dict[str, Tensor] = field(default_factory=dict)  # copies, if pipelined
    imputer: dict[str, Any] = field(default_factory=dict)
    sent: Tensor | None = None  # its embedding as it was encoded

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to compute a pass again."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {**vars(self), "output": None, "probe": None, "weights": weights}


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
        ``TRAIN``, ``VALID`` or ``TEST`` per row; None: by the strategy's fractions.
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
        self._waiting: list[_Pending] = []  # one pass, or several if pipelined
        self._update: dict[str, Tensor] = {}  # of the last step, if pipelined
        self._parameters: dict[str, nn.Parameter] = {}  # if pipelined
        self.pipeline = 0
        self.encoder: Encoder | None = None  # of embeddings
        self.shape: Shape = ()  # of one row of its embedding
        self._trained: tuple[Tensor, Tensor] | None = None  # rows, their embeddings
        self.questions: Sequence[int] | Tensor = ()  # see flower_vfl.protocol.serving
        self.answers = torch.empty(0)
        self._buffers = [  # where they are, for a model may put new ones in their place
            (f"{path}.{key}".lstrip("."), module, key)
            for path, module in model.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
            if buffer is not None
        ]

    def configure(self, config: TrainingConfig) -> None:
        """Take over the settings of a run and get ready for step 1."""
        super().configure(config)
        self._waiting, self._update, self.ahead = [], {}, 0
        self.pipeline = config.pipeline
        self._parameters = dict(self.model.named_parameters()) if self.pipeline else {}
        codec, seed = config.compress_embeddings, config.seed
        self.encoder = build_encoder(codec, seed, "embedding")
        self.codec = build_codec(config.compress_gradients)
        self.shape = config.parties.get(self.name, ())

    def forward(
        self, step: int, epoch: int, index: int, probed: bool = False
    ) -> Tensor:
        """Return the embedding of a batch; `probed` keeps the gradients of layers."""
        others = self._waiting if self.pipeline else []
        for waiting in others:
            if waiting.step == step:  # asked again, after a checkpoint was restored
                if waiting.output is None:
                    self._repeat(waiting, probed)
                assert waiting.output is not None  # just computed
                return waiting.output.detach()
        if len(others) > self.pipeline:
            first = f"step {others[0].step} waits for its gradient"
            problem = f"was asked for step {step} while {first}"
            raise PartyError(self.name, problem, _RESTORE, step)
        rows, random = self.training_rows(step, epoch, index), self.random.states
        buffers = {name: getattr(m, key).clone() for name, m, key in self._buffers}
        waiting = _Pending(step, epoch, index, None, random, buffers)
        if self.pipeline:
            waiting.imputer = self.imputer.state_dict()
            copied = [each.detach().clone() for each in self._parameters.values()]
            if self._update:  # one call for all of them
                updates = [*self._update.values()]
                torch._foreach_add_(copied, updates, alpha=len(others))
            waiting.weights = dict(zip(self._parameters, copied, strict=True))
        output = self._run(waiting, rows, probed)
        self._waiting = [*others, waiting]
        self.ahead = len(self._waiting) if self.pipeline else 0
        return output.detach()

    def _run(self, waiting: _Pending, rows: Tensor, probed: bool) -> Tensor:
        """Compute a pass, with its copy of the weights if there is one."""
        waiting.probe = LayerProbe(self.model) if probed else None
        if not self.model.training:
            self.model.train()
        for name, weight in self._parameters.items():
            waiting.weights[name].requires_grad_(weight.requires_grad)
        self.weights = waiting.weights
        try:
            with self.random, waiting.probe or nullcontext():
                output = self.embed_rows(rows, ("step", waiting.step), True)
        finally:
            self.weights = {}
        if self.pipeline:
            self.imputer.synthesizer.commit()  # like buffers, for the next pass
        waiting.output = output
        return output

    def _repeat(self, waiting: _Pending, probed: bool) -> None:
        """Compute a saved pass again; random state and buffers stay as they are."""
        random, imputer = self.random.states, self.imputer.state_dict()
        buffers = [getattr(module, key) for _, module, key in self._buffers]
        for name, module, key in self._buffers:
            setattr(module, key, waiting.buffers[name].clone())
        self.random.states = [*waiting.random]
        self.imputer.load_state_dict(waiting.imputer, embeds=True)
        try:
            self._run(waiting, self._rows_of(waiting), probed)
        finally:
            self.random.states = random
            self.imputer.load_state_dict(imputer, embeds=True)
            for (_, module, key), buffer in zip(self._buffers, buffers, strict=True):
                setattr(module, key, buffer)

    def _rows_of(self, waiting: _Pending) -> Tensor:
        if waiting.epoch != self._epoch:
            self._batches = self.configured().training_batches(waiting.epoch)
            self._epoch = waiting.epoch
        return self._batches[waiting.index]

    def _due(self, step: int, probed: bool) -> _Pending:
        """Return the forward pass that waits for the gradient of a step."""
        pending = self._waiting[0] if self._waiting else None
        if pending is None or pending.step != step:
            waits = f"step {pending.step}" if pending else "no gradient"
            problem = f"got the gradient of step {step} but expects {waits}"
            raise PartyError(self.name, problem, _RESTORE, step)
        if pending.output is None:  # the graph did not survive: repeat the forward pass
            if self.pipeline:
                self._repeat(pending, probed)
            else:
                self.forward(pending.step, pending.epoch, pending.index, probed)
        return self._waiting[0]

    def trace_layers(self, step: int, gradient: Tensor) -> dict[str, Tensor]:
        """Return what a gradient of the batch that is waiting is at every layer."""
        pending = self._due(step, True)
        assert pending.output is not None  # just computed
        if pending.probe is None or not pending.output.requires_grad:
            return {}
        return pending.probe.trace(pending.output, gradient.to(pending.output))

    def backward(
        self, step: int, gradient: Tensor | None, probed: bool = False
    ) -> dict[str, Tensor]:
        """Train on the gradient of the waiting batch, or not if it was withheld (None).

        With `probed`, the gradient of the output of every layer is returned.
        """
        pending = self._waiting[0] if self._waiting else None
        if pending is None or pending.step != step or pending.output is None:
            pending = self._due(step, probed)
        assert pending.output is not None  # just computed
        output, probe = pending.output, pending.probe
        if gradient is not None:
            what = "the gradient it received"
            if self.codec is not None:
                gradient = self.codec.read(gradient, self.shape, self.name, what, step)
            if gradient.shape != output.shape:
                problem = f"got a gradient of shape {tuple(gradient.shape)} for an "
                problem += f"embedding of shape {tuple(output.shape)}"
                remedy = "The label party and every transform must keep the shape"
                raise PartyError(self.name, problem, remedy, step)
            remedy = "Lower the learning rate, or check the defense that made it"
            check_finite(gradient, self.name, what, remedy, step)
            if self.optimizer is not None and output.requires_grad:
                clear_gradients(self.optimizer)
                gradient = gradient.to(output)
                output.backward(gradient)  # type: ignore[no-untyped-call]
                before = [each.detach().clone() for each in self._parameters.values()]
                for name, weight in self._parameters.items():
                    weight.grad = pending.weights[name].grad
                self.optimizer.step()
                if before:
                    after = [each.detach() for each in self._parameters.values()]
                    updates = torch._foreach_sub(after, before)
                    self._update = dict(zip(self._parameters, updates, strict=True))
        if self.imputer.row_index is not None:
            if not self.pipeline:
                self.imputer.synthesizer.commit()
            self._trained = self._rows_of(pending), output.detach()
        del self._waiting[0]
        self.ahead = len(self._waiting)
        self.step = step
        if self.cache is not None and gradient is not None:
            rows, sent = self._rows_of(pending), [output.detach()]
            kept = CachedBatch(step, rows, sent, [gradient])
            update_passive(self, self.cache, kept)
        return {} if probe is None else probe.gradients

    def membership(self, labels: Tensor | None, task: Task) -> dict[str, float]:
        """Return the AUC of each attack that finds missing rows of the last batch."""
        if self._trained is None:
            return {}
        rows, embedding = self._trained
        real = self.imputer.local[rows] >= 0
        return membership_aucs(with_labels(embedding, labels, task), real)

    def encode(self, output: Tensor, step: int, index: int) -> Tensor:
        """Return the embedding of the last batch as the codec of the run sends it."""
        assert self.encoder is not None  # the caller has looked
        waiting = next((each for each in self._waiting if each.step == step), None)
        if waiting is not None and waiting.sent is not None:
            return waiting.sent  # error feedback must not count it twice
        rows = self._batches[index]
        encoded = self.encoder.encode(output, self.name, step, rows)
        if waiting is not None:
            waiting.sent = encoded
        return encoded

    def embed(self, split: str, index: int) -> Tensor:
        """Return the embedding of a part of a split, in evaluation mode."""
        rows = self.configured().evaluation_rows(split, index)
        return self.embed_for_use(rows, (split, index))

    def embed_for_use(self, rows: Tensor, at: tuple[int | str, ...] = ()) -> Tensor:
        """Return the embedding of rows of the run, or of own rows without `at`."""
        if self.model.training:
            self.model.eval()
        with torch.no_grad(), self.random:
            found = self.embed_rows(rows, at)
        if self.encoder is None:
            return found
        # The top model then gets what it was trained on: decoded embeddings.
        return self.encoder.encode_for_use(found, self.name, self.step or None)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training changes, as of the last completed step."""
        state = super().state_dict()
        state["waiting"] = [each.state_dict() for each in self._waiting]
        if self.pipeline:
            state["update"] = dict(self._update)
        elif self._waiting:  # as it was before a pass that will be computed again
            pending, model = self._waiting[0], state["model"]
            state["waiting"] = [pending.step, pending.epoch, pending.index]
            model.update({k: v for k, v in pending.buffers.items() if k in model})
            before = enumerate(pending.random)
            state["random"] = {f"generator{i}": each for i, each in before}
        if self.encoder is not None:
            state["encoder"] = self.encoder.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        if self.encoder is not None:
            self.encoder.load_state_dict(state.get("encoder", {}))
        self._waiting, self.ahead = [], 0
        if self.pipeline:
            self._update = {n: t.to(self.device) for n, t in state["update"].items()}
            self._waiting = [_Pending(**each) for each in state["waiting"]]
            for each in self._waiting:
                each.weights = {n: t.to(self.device) for n, t in each.weights.items()}
                each.buffers = {n: t.to(self.device) for n, t in each.buffers.items()}
            self.ahead = len(self._waiting)
        elif state["waiting"]:
            given = *state["waiting"], None, self.random.states, {}
            self._waiting = [_Pending(*given)]
