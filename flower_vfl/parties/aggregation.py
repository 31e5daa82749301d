"""How the label party joins the embeddings of all parties into one."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import cast

import torch
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, PartyError, check_name
from flower_vfl.objectives import Objective
from flower_vfl.protocol.config import Shape

Aggregate = Callable[[Sequence[Tensor]], Tensor]


sum_parts: Aggregate = partial(reduce, torch.add)  # from the first part to the last
# Their gradients follow without autograd.
LINEAR: dict[str, Aggregate] = {
    "concat": partial(torch.cat, dim=1),
    "sum": sum_parts,
    "mean": lambda parts: sum_parts(parts) / len(parts),
}
AGGREGATIONS: dict[str, Aggregate] = {
    **LINEAR,
    "max": lambda parts: torch.stack(tuple(parts)).amax(dim=0),
    "product": partial(reduce, torch.mul),
}


class Aggregation(nn.Module):
    """One of the named aggregations, or a module of the user's."""

    def __init__(self, kind: str | nn.Module) -> None:
        super().__init__()
        self.module: nn.Module | None = None
        if isinstance(kind, nn.Module):
            self.name, self.module = "module", kind
        else:
            check_name("aggregation", kind, AGGREGATIONS)
            self.name = kind

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the embeddings."""
        if self.module is not None:
            return cast(Tensor, self.module(parts))
        joined = AGGREGATIONS[self.name](list(parts))
        # The only part may still be its party's: a top model may work in place.
        return joined.clone() if joined is parts[0] else joined

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Refuse embeddings that cannot be joined."""
        if self.name not in ("concat", "module") and len(set(shapes.values())) > 1:
            listed = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
            raise ConfigError(
                f"aggregation '{self.name}' needs embeddings of one shape, got {listed}"
                "; give every bottom model the same width or use 'concat'"
            )


def try_shapes(
    joiner: Aggregation,
    objective: Objective,
    shapes: Mapping[str, Shape],
    name: str,
    device: torch.device,
) -> None:
    """Send zeros through aggregation and top model, to fail before training."""
    joiner.check(shapes)
    parts = [torch.zeros(2, *shape, device=device) for shape in shapes.values()]
    was_training = objective.training
    objective.eval()
    joined = ""
    try:
        with torch.no_grad():
            embedding = joiner.eval()(parts)
            joined = f", {'×'.join(map(str, embedding.shape[1:]))} columns"
            objective.predict(embedding)
    except (RuntimeError, ValueError, IndexError) as error:
        others = [(party, shape) for party, shape in shapes.items() if party != name]
        listed = ", ".join(f"{party} {shape}" for party, shape in others)
        problem = f"the embeddings ({listed}) do not fit aggregation '{joiner.name}'"
        remedy = f"Make the top model's input as wide as the joined embedding{joined}"
        problem += f" and the top model: {error}"
        raise PartyError(name, problem, remedy) from error
    finally:
        objective.train(was_training)
        joiner.train()


def labels_remedy(labels: Tensor, objective: Objective) -> str:
    """Return what to do about labels that an objective refuses."""
    name, found = type(objective).__name__, torch.unique(labels)
    classes, known = len(found), getattr(objective, "classes", math.inf)
    if classes > known and torch.equal(found.long().cpu(), torch.arange(classes)):
        return f"Give classes={classes} to {name}, and {classes} outputs to its top"
    return f"The objective is {name}"


def one_choice(own: str | nn.Module | None, told: str, party: str) -> str | nn.Module:
    """Return how a label party joins embeddings; refuse two different answers."""
    chosen = own or told or "concat"
    if told and chosen != told:
        name = chosen if isinstance(chosen, str) else type(chosen).__name__
        problem = f"is set to aggregation '{name}', the strategy to '{told}'"
        raise PartyError(party, problem, "Set it in one place only")
    return chosen
