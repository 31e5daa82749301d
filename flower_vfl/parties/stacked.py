"""Passive parties of one shape, computed as one: a leading dimension of parties."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, cast

import torch
from flwr.supercore import log
from torch import Tensor, nn, optim
from torch.func import functional_call, stack_module_state, vmap

from flower_vfl.objectives import OptimizerFactory
from flower_vfl.randomness import RandomState

from .passive import PassiveParty

# Each number is updated from its own gradient and state alone, so that stacked
# parameters take the steps that they would take one by one.
_ELEMENTWISE = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Rprop),
    }
)
_HOOKS = (  # of modules, and of weights
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
    *("_backward_pre_hooks", "_post_accumulate_grad_hooks"),
)
_MODULE = vars(nn.Module()).keys()  # what every module has
_ROWS = 2**13  # of all parties of a chunk: activations stay in the cache of a CPU


class StackedModel(nn.Module):
    """Models of one architecture with stacked weights: (parties, rows, ...) each."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._one = (models[0],)  # whose code runs; a tuple, for it is no submodule
        parameters, buffers = stack_module_state(list(models))
        self._names = [*parameters, *buffers]
        self.weights = nn.ParameterList(parameters.values())
        for own, stacked in zip(models[0].parameters(), self.weights, strict=True):
            stacked.requires_grad_(own.requires_grad)
        for number, buffer in enumerate(buffers.values()):
            self.register_buffer(str(number), buffer)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the outputs of all models, each for its own rows."""
        if self._one[0].training != self.training:  # its party may have worked alone
            self._one[0].train(self.training)
        rows, cuda = inputs[0].shape[1], inputs[0].is_cuda
        chunk = None if cuda else max(1, _ROWS // max(rows, 1))
        buffers = list(self.buffers())
        # Copies, because autograd refuses a buffer that is changed after it was used.
        tensors = [*self.weights, *(buffer.clone() for buffer in buffers)]
        output: Tensor
        output, *changed = vmap(self._run, chunk_size=chunk)(tensors, inputs)
        with torch.no_grad():
            _restore(buffers, changed)
        return output

    def _run(
        self, tensors: list[Tensor], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the output of one model and its buffers, which it may replace."""
        named = dict(zip(self._names, tensors, strict=True))
        output = functional_call(self._one[0], named, inputs)
        return output, *(named[name] for name in self._names[len(self.weights) :])


class StackedParty(PassiveParty):
    """Passive parties that compute together: a passive party to their node.

    Meanwhile weights and buffers of the members are views of the stacked ones. Before a
    message reaches a member alone, :meth:`release` gives each its own state back.
    """

    def __init__(self, members: Sequence[PassiveParty]) -> None:
        first = members[0]
        features = zip(*(member.features for member in members), strict=True)
        super().__init__(
            [torch.stack(parts) for parts in features],
            StackedModel([member.model for member in members]),
            optimizer=first.make_optimizer,
            name=f"{first.name} and {len(members) - 1} others",
            device=first.device,
        )
        self.members = list(members)
        self.together = False
        self.divided = False  # for good: the optimizers differ in their steps
        self.schedule = first.schedule
        if first.optimizer is not None:
            # Not by the factory, which may choose weights by their dimensions.
            known = _optimised(first)
            both = zip(first.model.parameters(), self.model.parameters(), strict=True)
            trained = [stacked for weight, stacked in both if weight in known]
            kind = cast(OptimizerFactory, type(first.optimizer))
            self.optimizer = kind(trained)
            for own, group in zip(_groups(first), _groups(self), strict=True):
                group.update({k: v for k, v in own.items() if k != "params"})

    def _tensors(self) -> Iterable[tuple[Tensor, list[Tensor]]]:
        """Return every stacked weight and buffer with those of the members."""
        for kind in ("parameters", "buffers"):
            own = zip(*(getattr(m.model, kind)() for m in self.members), strict=True)
            yield from zip(getattr(self.model, kind)(), map(list, own), strict=True)

    def gather(self) -> bool:
        """Stack the state of all members; return whether they can compute together."""
        if self.together or self.divided:
            return self.together
        first = self.members[0]
        if any(member._waiting for member in self.members):
            return False  # they began the step alone, and end it alone
        pairs = [(t, own) for t, own in self._tensors() if t.requires_grad]
        states = {stacked: self._gathered(own) for stacked, own in pairs}
        steps = {member.step for member in self.members}
        if len(steps) > 1 or any(state is None for state in states.values()):
            log(WARNING, "%s: steps differ, so they go on one by one", self.name)
            self.divided = True
            return False
        with torch.no_grad():
            for stacked, own in self._tensors():
                torch.stack([each.detach() for each in own], out=stacked.detach())
                for each, view in zip(own, stacked.detach().unbind(), strict=True):
                    each.data = view
        if self.optimizer is not None:
            self.optimizer.state.update(states)
        self.step, self.schedule, self._epoch = first.step, first.schedule, 0
        self._waiting = []
        self.together = True
        return True

    def _gathered(self, own: Sequence[Tensor]) -> dict[str, Any] | None:
        """Return the stacked optimizer state of a weight; None if steps differ."""
        pairs = zip(self.members, own, strict=True)
        states = [m.optimizer.state.get(p, {}) for m, p in pairs if m.optimizer]
        found: dict[str, Any] = {}
        if any(state.keys() != states[0].keys() for state in states):
            return None
        for key, value in states[0].items():
            values = [state[key] for state in states]
            if isinstance(value, Tensor) and value.shape == own[0].shape:
                found[key] = torch.stack(values)
            elif any(each != value for each in values):
                return None
            else:
                found[key] = value.clone() if isinstance(value, Tensor) else value
        return found

    def release(self) -> None:
        """Give every member a state of its own again."""
        if not self.together:
            return
        self.together = False
        waiting, self._waiting = self._waiting, []
        for passed in waiting:  # the forward pass is done again by each member
            for name, module, key in self._buffers:
                getattr(module, key).copy_(passed.buffers[name])
        for stacked, own in self._tensors():
            state = self.optimizer.state.get(stacked) if self.optimizer else None
            for i, (member, each) in enumerate(zip(self.members, own, strict=True)):
                each.data = stacked.detach()[i].clone()
                if state and member.optimizer is not None:
                    parts = {k: _part(v, i, stacked) for k, v in state.items()}
                    member.optimizer.state[each] = parts
        for member in self.members:
            random = member.random.states
            member._waiting = [
                replace(passed, output=None, random=random, buffers={})
                for passed in waiting
            ]

    def embed_rows(
        self, rows: Tensor, at: tuple[int | str, ...] = (), training: bool = False
    ) -> Tensor:
        """Return the embeddings of all members for some rows."""
        output: Tensor = self.model(*(f.index_select(1, rows) for f in self.features))
        return output

    def forward(
        self, step: int, epoch: int, index: int, probed: bool = False
    ) -> Tensor:
        """Return the embeddings of a training batch and wait for their gradients."""
        if self.gather():
            return super().forward(step, epoch, index)
        return torch.stack([m.forward(step, epoch, index) for m in self.members])

    def backward(
        self, step: int, gradient: Tensor | None, probed: bool = False
    ) -> dict[str, Tensor]:
        """Train all models on the gradients of the batch that is waiting."""
        assert gradient is not None  # a group is not asked if one was withheld
        outputs = [each.output for each in self._waiting if each.output is not None]
        fits = outputs and gradient.shape == outputs[0].shape
        if fits and math.isfinite(gradient.sum().item()):
            super().backward(step, gradient)
            for member in self.members:
                member.step = step
            return {}
        self.release()
        for member, part in zip(self.members, gradient, strict=True):
            member.backward(step, part)  # names the party whose gradient is wrong
        return {}

    def embed(self, split: str, index: int) -> Tensor:
        """Return the embeddings of a part of a split, in evaluation mode."""
        if self.gather():
            return super().embed(split, index)
        return torch.stack([member.embed(split, index) for member in self.members])

    def misfits(self) -> list[PassiveParty]:
        """Return the members whose model differs from the stacked one for two rows."""
        rows = torch.arange(min(2, len(self.members[0].features[0])))
        rows, buffers = rows.to(self.device), list(self.model.buffers())
        found = set()
        self.gather()
        before = [buffer.clone() for buffer in buffers]
        try:
            for training in (True, False):
                with RandomState(0, self.device):
                    self.model.train(training)
                    outputs = self.embed_rows(rows)
                    after = [buffer.clone() for buffer in buffers]
                    _restore(buffers, before)
                    for i, member in enumerate(self.members):
                        member.model.train(training)
                        pairs = [(member.embed_rows(rows), outputs[i])]
                        both = zip(buffers, after, strict=True)
                        pairs += [(buffer[i], now[i]) for buffer, now in both]
                        if not all(_close(*pair) for pair in pairs):
                            found.add(i)
                _restore(buffers, before)
                if outputs.requires_grad:
                    weights = [w for w in self.model.parameters() if w.requires_grad]
                    torch.autograd.grad(outputs.sum(), weights, allow_unused=True)
        finally:
            _restore(buffers, before)
            self.release()
        return [self.members[i] for i in sorted(found)]


def stack_parties(
    parties: Iterable[PassiveParty],
) -> tuple[list[StackedParty], dict[str, str]]:
    """Return groups of parties that compute together, and why others do not."""
    kinds: dict[Hashable, list[PassiveParty]] = {}
    alone: dict[str, str] = {}
    for party in parties:
        if reason := _unfit(party):
            alone[party.name] = reason
        else:
            kinds.setdefault(_kind(party), []).append(party)
    groups = []
    for members in kinds.values():
        while len(members) > 1:
            try:
                group = StackedParty(members)
                misfits = group.misfits()
            except (RuntimeError, ValueError, TypeError) as error:
                reason = f"torch cannot stack its model: {str(error).splitlines()[0]}"
                alone |= {member.name: reason for member in members}
                members = []
                break
            if not misfits:
                groups.append(group)
                break
            reason = "its model differs from others of its architecture"
            alone |= {member.name: reason for member in misfits}
            members = [member for member in members if member not in misfits]
        if len(members) == 1:
            alone[members[0].name] = "no other party has its model, shape and optimizer"
    sizes = ", ".join(str(len(group.members)) for group in groups) or "none"
    log(INFO, "stacked groups of parties: %s; one by one: %d", sizes, len(alone))
    for reason in dict.fromkeys(alone.values()):
        names = [name for name, why in alone.items() if why == reason]
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        log(INFO, "one by one: %s%s (%s)", names[0], others, reason)
    return groups, alone


def _unfit(party: PassiveParty) -> str:
    """Return why a party has to compute alone, or nothing."""
    optimizer = party.optimizer
    parts = [*party.model.modules(), *party.model.parameters()]
    if type(party) is not PassiveParty:
        return f"it is a {type(party).__name__}"
    if party.imputer.row_index is not None:
        return "it imputes rows, or its ids were aligned"
    if any(getattr(part, each, None) for part in parts for each in _HOOKS):
        return "its model has hooks"
    if optimizer is not None:
        if type(optimizer) not in _ELEMENTWISE or len(optimizer.param_groups) > 1:
            return f"its optimizer is {type(optimizer).__name__}, or has several groups"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return "its optimizer has hooks"
    if not party.features or any(not p.ndim for p in party.model.parameters()):
        return "it has no features, or a weight without dimensions"
    return ""


def _kind(party: PassiveParty) -> Hashable:
    """Return what parties that compute together have in common."""
    named = [*party.model.named_parameters(), *party.model.named_buffers()]
    known = _optimised(party)
    weights = [
        (name, t.shape, t.dtype, t.requires_grad, t in known) for name, t in named
    ]
    features = [(part.shape, part.dtype) for part in party.features]
    options = [
        sorted((k, str(v)) for k, v in group.items() if k != "params")
        for group in _groups(party)
    ]
    code = type(party.model), repr(party.model), type(party.optimizer)
    attributes = [  # numbers and functions, say, that a model need not print
        (name, sorted((k, str(v)) for k, v in vars(module).items() if k not in _MODULE))
        for name, module in party.model.named_modules()
    ]
    return code, str((party.device, features, weights, options, attributes))


def _groups(party: PassiveParty) -> list[dict[str, Any]]:
    return [] if party.optimizer is None else party.optimizer.param_groups


def _optimised(party: PassiveParty) -> set[Tensor]:
    return {weight for group in _groups(party) for weight in group["params"]}


def _part(value: Any, index: int, stacked: Tensor) -> Any:
    """Return what an entry of a stacked optimizer state is for one party."""
    if not isinstance(value, Tensor):
        return value
    return (value[index] if value.shape == stacked.shape else value).clone()


def _restore(buffers: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for buffer, was in zip(buffers, before, strict=True):
        buffer.copy_(was)


def _close(one: Tensor, other: Tensor) -> bool:
    fits = one.shape == other.shape
    return fits and torch.allclose(one.float(), other.float(), rtol=1e-4, atol=1e-5)
