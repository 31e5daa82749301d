"""The leakage meter: every score attack on every batch, at the party with the labels.

It keeps nothing, and what it returns are AUCs, never labels or rows.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks.known import GroupedLabels, attacker
from flower_vfl.leakage.attacks.registry import (
    DEFAULT_ATTACKS,
    attack_scores,
    build_attack,
    leaks,
)
from flower_vfl.leakage.attacks.stacked import PartyBatch, stacked_leaks
from flower_vfl.objectives import Task
from flower_vfl.randomness import generator
from flower_vfl.records import Measurement

LEAK, FLIPPED = "leak", "leak_flipped"
REMEDY = "Look at that party's gradient, and at the settings of the leakage meter"


class StepBatch(NamedTuple):
    """The arguments of :meth:`LeakageMeter.measure`."""

    gradients: Mapping[str, Tensor]
    labels: Tensor
    step: int
    clean: Mapping[str, Tensor] | None = None
    layer: str = ""
    coalitions: Iterable[Sequence[str]] = ()
    embeddings: Mapping[str, Tensor] | None = None


@contextmanager
def _at_fault(party: str, step: int) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise PartyError(party, str(error), REMEDY, step) from error


class LeakageMeter:
    """Runs score attacks on gradients.

    The value of an attack on a batch is its leak AUC. With more than two classes that
    is the mean over the classes, each against the rest. For a regression it is
    Pearson's rho of score and label, and of several scores the one of largest |rho|.
    Flipped values are max(a, 1 − a), for each class before the mean, or |rho|.

    Parameters
    ----------
    attacks : Sequence[str] | None (default: None)
        Names of `SCORE_ATTACKS`, perhaps with parameters. None takes norm, cosine, mean
        and median, or for a regression norm, direct and spectral.
    task : {"binary", "multiclass", "regression"} (default: "binary")
        What the labels are.
    baseline : bool (default: False)
        Measure random gradients of the same shape beside every batch: what the attacks
        find where there is nothing to find.
    seed : int (default: 0)
        Of the random gradients.

    Examples
    --------
    >>> meter = LeakageMeter(("norm", "mean"))
    >>> gradient = torch.tensor([[0.1, 0.0], [0.2, 0.0], [0.9, 0.1], [0.7, 0.2]])
    >>> found = meter.measure({"bank": gradient}, torch.tensor([0, 0, 1, 1]), step=1)
    >>> {each.name: each.value for each in found if each.metric == "leak"}
    {'leak_norm/bank': 1.0, 'leak_mean/bank': 1.0}
    """

    def __init__(
        self,
        attacks: Sequence[str] | None = None,
        task: Task = "binary",
        baseline: bool = False,
        seed: int = 0,
    ) -> None:
        if task not in DEFAULT_ATTACKS:
            raise ConfigError(f"unknown task '{task}' of a leakage meter")
        self.attacks = DEFAULT_ATTACKS[task] if attacks is None else tuple(attacks)
        self.task: Task = task
        self.baseline = baseline
        self.seed = seed
        self.built = [build_attack(spec, task) for spec in self.attacks]

    def measure(
        self,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        step: int,
        clean: Mapping[str, Tensor] | None = None,
        layer: str = "",
        coalitions: Iterable[Sequence[str]] = (),
        embeddings: Mapping[str, Tensor] | None = None,
    ) -> list[Measurement]:
        """Attack the gradients of several parties for the same rows.

        Parameters
        ----------
        gradients : Mapping[str, Tensor]
            What each party gets, one row per example.
        labels : Tensor
            One label per row.
        step : int
            The training step.
        clean : Mapping[str, Tensor] | None (default: None)
            The gradients before the defense, where the one that the cosine attack knows
            comes from.
        layer : str (default: "")
            The layer that the gradients are of; empty for the cut layer.
        coalitions : Iterable[Sequence[str]] (default: ())
            Parties to attack as if one attacker had all their gradients.
        embeddings : Mapping[str, Tensor] | None (default: None)
            What each party sent for the same rows, for the attacks that look at it.

        Returns
        -------
        list[Measurement]
            ``leak`` and ``leak_flipped`` of each attack on each party and coalition,
            and with `baseline` ``leak_random`` and ``leak_flipped_random``. Nothing
            where an attack cannot be measured, as on a batch with one class only.
        """
        given = gradients, labels, step, clean, layer, coalitions, embeddings
        return self.measure_steps([StepBatch(*given)])

    def measure_steps(self, steps: Sequence[StepBatch]) -> list[Measurement]:
        """Attack the gradients of several steps, faster than one step at a time."""
        batches = [self._batches(each) for each in steps]
        steps = [step for step, own in zip(steps, batches, strict=True) if own]
        batches = [own for own in batches if own]
        labels = []
        for step in steps:
            with _at_fault(" and ".join(step.gradients), step.step):
                labels.append(GroupedLabels.read(self.task, step.labels))
        stacked = stacked_leaks(self.built, list(zip(labels, batches, strict=True)))
        found = []
        for number, (step, read) in enumerate(zip(steps, labels, strict=True)):
            for position, batch in enumerate(batches[number]):
                pairs = stacked.get((number, position))
                if pairs is None:
                    with _at_fault(batch.party, step.step):
                        given = batch.gradient, batch.clean, batch.embedding
                        rows, known = attacker(read, *given)
                        scores = attack_scores(self.built, rows, known)
                        pairs = leaks(self.built, scores, known)
                raw, flipped = LEAK + batch.kind, FLIPPED + batch.kind
                for attack, (leak, best) in zip(self.attacks, pairs, strict=True):
                    if not math.isnan(leak):
                        at = step.step, batch.party, attack, step.layer
                        found.append(Measurement(raw, leak, *at))
                        found.append(Measurement(flipped, best, *at))
        return found

    def _batches(self, given: StepBatch) -> list[PartyBatch]:
        """Return what each party and coalition gets, and random gradients beside it."""
        gradients, _, step, clean, layer, coalitions, embeddings = given
        clean, sent = clean or {}, embeddings or {}
        batches = [
            PartyBatch(name, gradient, clean.get(name), sent.get(name))
            for name, gradient in gradients.items()
        ]
        for members in coalitions:
            complete = all(member in clean for member in members)
            before = _join(clean, members, step) if complete else None
            joined = _join(gradients, members, step)
            batches.append(PartyBatch("+".join(members), joined, before))
        if self.baseline:
            batches += [self._random(batch, layer, step) for batch in batches]
        return batches

    def _random(self, batch: PartyBatch, layer: str, step: int) -> PartyBatch:
        stream = generator(self.seed, "baseline", batch.party, layer or "cut", step)
        gradient, sent = (
            None if part is None else torch.randn(part.shape, generator=stream).to(part)
            for part in (batch.gradient, batch.embedding)
        )
        assert gradient is not None  # only embeddings may be missing
        return PartyBatch(batch.party, gradient, None, sent, "_random")


def _join(gradients: Mapping[str, Tensor], members: Iterable[str], step: int) -> Tensor:
    """Put the rows of several parties side by side."""
    parts = [gradients[name].reshape(len(gradients[name]), -1) for name in members]
    if len({len(part) for part in parts}) != 1:
        sizes = ", ".join(str(len(part)) for part in parts)
        problem = f"its members' gradients have {sizes} rows"
        raise PartyError("+".join(members), problem, REMEDY, step)
    return torch.cat(parts, dim=1)


class LayerProbe(ExitStack):
    """Keeps the gradient of each layer that runs inside the context, once known."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._layers = {
            name or type(model).__name__: module
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        self._calls = Counter[str]()
        self._found: dict[str, Tensor | None] = {}  # in the order of the forward pass
        self._edges: dict[str, GradientEdge] = {}  # which in-place operations keep

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients by layer, in the order of the forward pass."""
        return {use: g for use, g in self._found.items() if g is not None}

    def trace(self, output: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of all layers for another gradient of the output."""
        edges = list(self._edges.values())
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad([output], edges, [gradient], **options)
        named = zip(self._edges, found, strict=True)
        return {use: each for use, each in named if each is not None}

    def __enter__(self) -> Self:
        """Look at every layer from now on."""
        for name, module in self._layers.items():
            hook = partial(self._look, name)
            self.enter_context(module.register_forward_hook(hook))
        return self

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._calls[name] += 1
        count = self._calls[name]
        use = name if count == 1 else f"{name}#{count}"

        found = self._found  # not self: its edges would keep the graph, which keeps it

        def keep(gradient: Tensor) -> None:
            found[use] = gradient.detach()

        if isinstance(output, Tensor) and output.requires_grad:
            self._found[use], self._edges[use] = None, get_gradient_edge(output)
            output.register_hook(keep)  # type: ignore[no-untyped-call]
