"""How the label party joins the embeddings of all parties into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, PartyError, unknown_name
from flower_vfl.objectives import Objective, Outcome
from flower_vfl.protocol.config import Shape

from .base import check_finite

Aggregate = Callable[[Sequence[Tensor]], Tensor]


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum, added from the first part to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def mean_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean."""
    return sum_parts(parts) / len(parts)


def max_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the largest entry in each place."""
    return torch.stack(tuple(parts)).amax(dim=0)


def product_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the product, multiplied from the first part to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = total * part
    return total


def concat_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts side by side."""
    return torch.cat(tuple(parts), dim=1)


AGGREGATIONS: dict[str, Aggregate] = {
    "concat": concat_parts,
    "sum": sum_parts,
    "mean": mean_parts,
    "max": max_parts,
    "product": product_parts,
}


class Aggregation(nn.Module):
    """One of the named aggregations, or a module of the user's."""

    def __init__(self, kind: str | nn.Module) -> None:
        super().__init__()
        self.module: nn.Module | None = None
        if isinstance(kind, nn.Module):
            self.name, self.module = "module", kind
        elif kind in AGGREGATIONS:
            self.name = kind
        else:
            raise unknown_name("aggregation", kind, AGGREGATIONS)

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the embeddings."""
        if self.module is not None:
            return cast(Tensor, self.module(parts))
        joined = AGGREGATIONS[self.name](parts)
        # The only part may still be its party's: a top model may work in place.
        return joined.clone() if joined is parts[0] else joined

    @property
    def linear(self) -> bool:
        """Whether :meth:`pull_back` can take the place of autograd."""
        return self.name in ("concat", "sum", "mean")

    def pull_back(self, gradient: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of each part of a linear aggregation."""
        if self.name == "concat":
            return list(torch.split(gradient, [part.shape[1] for part in parts], 1))
        share = gradient / len(parts) if self.name == "mean" else gradient
        return [share] * len(parts)

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuse embeddings that cannot be joined."""
        if self.name in ("concat", "module"):
            return
        if len(set(shapes.values())) > 1:
            listed = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
            raise ConfigError(
                f"aggregation '{self.name}' needs embeddings of one shape, got {listed}"
                "; give every bottom model the same width or use 'concat'"
            )


def check_embeddings(
    embeddings: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    rows: int,
    step: int | None,
) -> dict[str, Tensor]:
    """Return the embeddings in the agreed order, or name the party whose is wrong."""
    remedy = "Look at that party's features, model and learning rate"
    checked = {}
    for name, shape in shapes.items():
        if name not in embeddings:
            raise PartyError(name, "its embedding is missing", remedy, step)
        part = embeddings[name]
        if part.shape != (rows, *shape):
            raise PartyError(
                name,
                f"sent an embedding of shape {tuple(part.shape)}; {(rows, *shape)} was "
                "agreed on",
                "Its bottom model must return one row per input row, always of the "
                "same width",
                step,
            )
        check_finite(part, name, "its embedding", remedy, step)
        checked[name] = part
    return checked


def try_shapes(
    joiner: Aggregation,
    objective: Objective,
    shapes: Mapping[str, Shape],
    name: str,
    device: torch.device,
) -> None:
    """Send zeros through aggregation and top model, to fail before training."""
    joiner.check(dict(shapes))
    parts = [torch.zeros(2, *shape, device=device) for shape in shapes.values()]
    was_training = objective.training
    objective.eval()
    try:
        with torch.no_grad():
            objective.predict(joiner.eval()(parts))
    except (RuntimeError, ValueError, IndexError) as error:
        others = [(party, shape) for party, shape in shapes.items() if party != name]
        listed = ", ".join(f"{party} {shape}" for party, shape in others)
        raise PartyError(
            name,
            f"the embeddings ({listed}) do not fit aggregation '{joiner.name}' and the "
            f"top model: {error}",
            "Make the top model's input as wide as the joined embedding",
        ) from error
    finally:
        objective.train(was_training)
        joiner.train()


def train_joined(
    joiner: Aggregation,
    own: Sequence[Tensor],
    received: Sequence[Tensor],
    learn: Callable[[Tensor], Outcome],
    descend: Callable[[Tensor, Tensor], None],
) -> tuple[Outcome, list[Tensor]]:
    """Train the label party's modules on a batch."""
    if joiner.linear:
        joined = joiner([part.detach() for part in [*own, *received]])
        outcome = learn(joined.detach().requires_grad_())
        gradients = joiner.pull_back(outcome.gradient, [*own, *received])
        if own and own[0].requires_grad:
            descend(own[0], gradients[0])
        return outcome, gradients[len(own) :]
    leaves = [part.detach().requires_grad_() for part in received]
    joined = joiner([*own, *leaves])
    outcome = learn(joined.detach().requires_grad_())
    descend(joined, outcome.gradient)
    return outcome, [
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
    ]
