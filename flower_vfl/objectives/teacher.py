"""Teachers of soft labels, and what k-anonymity makes of what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError


def top_classes(logits: Tensor, k: int) -> Tensor:
    """Return the k classes that a teacher finds most likely, the likeliest first."""
    # Softmax keeps the order, so that it need not be taken.
    return logits.topk(k, dim=1).indices


def true_and_top_classes(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return the true class, then the k−1 others that a teacher finds most likely."""
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
        Called as ``teacher(*inputs)``; returns logits (B, C). One without parameters
        to train is left as it is.
    inputs : Sequence[Tensor]
        One row per label.
    labels : Tensor
        Class numbers.
    epochs : int (default: 50)
        Passes over the rows, shuffled by torch's global generator.
    batch_size : int (default: 128)
        Rows of a batch; a last batch of a single row is left out.
    lr : float (default: 5e-3)
        Learning rate.
    """
    parameters = [p for p in teacher.parameters() if p.requires_grad]
    if not parameters:
        return
    optimizer = torch.optim.Adam(parameters, lr=lr)
    teacher.train()
    for _ in range(epochs):
        order = torch.randperm(len(labels)).to(labels.device)
        for rows in torch.split(order, batch_size):
            if len(rows) < 2 <= len(labels):  # a batch norm could not train on it
                continue
            optimizer.zero_grad()
            logits = teacher(*(part.index_select(0, rows) for part in inputs))
            loss = F.cross_entropy(logits, labels[rows].long())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def teacher_logits(
    teacher: nn.Module, inputs: Sequence[Tensor], classes: int, rows: int = 4096
) -> Tensor:
    """Return a teacher's logits of all rows."""
    teacher.eval()
    parts = zip(*(torch.split(part, rows) for part in inputs), strict=True)
    logits = torch.cat([cast(Tensor, teacher(*part)) for part in parts])
    if logits.dim() != 2 or logits.shape[1] != classes:
        raise ConfigError(
            f"a teacher for {classes} classes must return as many columns, got the "
            f"shape {tuple(logits.shape)}"
        )
    return logits
