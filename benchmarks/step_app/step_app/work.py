"""The model and the data of the step benchmark, and the plain loop."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.simulations.datasets.types import InputSpec
from flower_vfl.simulations.models import build_bottom, build_top

MARVELL, SMALL = "mlp:hidden=128+128", "mlp:hidden=64"
COLUMNS = 32  # features of each party
ROWS = 8192


def features(party: int) -> Tensor:
    """Return the features of one party."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(party))


def labels() -> Tensor:
    """Return the labels."""
    stream = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (ROWS,), generator=stream).float()


def bottom_model(width: int, kind: str = MARVELL) -> nn.Module:
    """Return the bottom model of one party."""
    return build_bottom(kind, InputSpec(numeric=COLUMNS), width)


def top_model(parties: int, width: int) -> nn.Module:
    """Return the top model."""
    return build_top("linear", width * parties, 1)


class PlainLoop:
    """The same model trained in one piece, the ordinary way."""

    def __init__(
        self, parties: int, width: int, batch_size: int, kind: str = MARVELL
    ) -> None:
        self.features = [features(party) for party in range(1, parties + 1)]
        self.labels = labels()
        self.bottoms = [bottom_model(width, kind) for _ in range(parties)]
        self.top = top_model(parties, width)
        modules = nn.ModuleList([*self.bottoms, self.top])
        self.optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)
        self.batch_size = batch_size

    def epoch(self) -> float:
        """Train an epoch and return the seconds of a step."""
        started = time.perf_counter()
        batches = torch.randperm(ROWS).split(self.batch_size)
        for rows in batches:
            self.optimizer.zero_grad()
            parts = [
                bottom(x[rows])
                for bottom, x in zip(self.bottoms, self.features, strict=True)
            ]
            output = self.top(torch.cat(parts, dim=1))[:, 0]
            loss = F.binary_cross_entropy_with_logits(output, self.labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            loss.item()
        return (time.perf_counter() - started) / len(batches)


class SplitLoop:
    """The same model trained in pieces, without messages.

    Every bottom model and the top model have their own optimizer and backward pass, as
    the parties of a split run have. `fused` is Adam's, as the parties have it.
    """

    def __init__(
        self,
        parties: int,
        width: int,
        batch_size: int,
        kind: str = MARVELL,
        fused: bool = False,
    ) -> None:
        self.features = [features(party) for party in range(1, parties + 1)]
        self.labels = labels()
        self.bottoms = [bottom_model(width, kind) for _ in range(parties)]
        self.top = top_model(parties, width)
        self.optimizers = [
            torch.optim.Adam(module.parameters(), lr=1e-3, fused=fused)
            for module in (*self.bottoms, self.top)
        ]
        self.batch_size = batch_size

    def epoch(self) -> float:
        """Train an epoch and return the seconds of a step."""
        started = time.perf_counter()
        batches = torch.randperm(ROWS).split(self.batch_size)
        for rows in batches:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            parts = [
                bottom(x[rows])
                for bottom, x in zip(self.bottoms, self.features, strict=True)
            ]
            joined = torch.cat([part.detach() for part in parts], dim=1)
            joined.requires_grad_()
            output = self.top(joined)[:, 0]
            loss = F.binary_cross_entropy_with_logits(output, self.labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            assert joined.grad is not None  # just computed
            gradients = joined.grad.split([part.shape[1] for part in parts], dim=1)
            for part, gradient in zip(parts, gradients, strict=True):
                part.backward(gradient)  # type: ignore[no-untyped-call]
            for optimizer in self.optimizers:
                optimizer.step()
            loss.item()
        return (time.perf_counter() - started) / len(batches)
