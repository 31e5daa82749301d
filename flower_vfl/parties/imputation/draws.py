"""Formulas of the synthetic labels, as functions of tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """Return how many labels each class has."""
    return torch.bincount(labels.long(), minlength=classes)


def majority_class(counts: Tensor) -> int:
    """Return the most frequent class; of several the first."""
    return int(counts.argmax())


def minority_class(counts: Tensor) -> int:
    """Return the rarest class that occurs, other than the majority; 1 of 0 and 1."""
    rare = counts.clone()
    rare[rare == 0] = torch.iinfo(rare.dtype).max - 1  # rather not: nobody has it
    rare[majority_class(counts)] = torch.iinfo(rare.dtype).max
    return int(rare.argmin())


def draw_predicted(
    probabilities: Tensor, samples: int, generator: torch.Generator
) -> Tensor:
    """Return labels drawn by predicted probabilities, averaged over several draws."""
    chances = probabilities.detach().double().cpu().clamp(0.0, 1.0)
    if chances.dim() == 1:
        draws = torch.rand(
            samples, len(chances), generator=generator, dtype=torch.float64
        )
        shares = (draws < chances).double().mean(dim=0)
    else:
        drawn = torch.multinomial(
            chances, samples, replacement=True, generator=generator
        )
        shares = F.one_hot(drawn, chances.shape[1]).double().mean(dim=1)
    return shares.to(probabilities)


def nearest_labels(embedding: Tensor, known: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return the labels of the k known rows of largest cosine, (B, k)."""
    rows, others = (F.normalize(part.flatten(1), dim=1) for part in (embedding, known))
    nearest = (rows @ others.T).topk(min(k, len(known)), dim=1).indices
    return labels[nearest]


def vote(labels: Tensor, classes: int) -> Tensor:
    """Return the most frequent class of each row; of several that of the nearest."""
    hits = F.one_hot(labels.long(), classes)
    # A tie is decided by who comes first, so weigh the first a little more.
    order = torch.linspace(0.5, 0.0, labels.shape[1], device=labels.device)
    weights = 1.0 + order / max(labels.shape[1], 1)
    return (hits * weights[None, :, None]).sum(dim=1).argmax(dim=1)
