"""Inputs of every kind for the tests of models."""

import torch
from torch import Tensor, nn

from flower_vfl.simulations.datasets.types import InputSpec

NUMERIC = InputSpec(numeric=57)
MIXED = InputSpec(numeric=3, cardinalities=(5, 7))
CATEGORICAL = InputSpec(cardinalities=(5, 7, 2))


def make_inputs(spec: InputSpec, rows: int = 6, seed: int = 0) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    if spec.image is not None:
        shape = (rows, *spec.image)
        return (torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8),)
    inputs = []
    if spec.numeric:
        inputs.append(torch.randn(rows, spec.numeric, generator=rng))
    if spec.cardinalities:
        columns = [
            torch.randint(0, codes, (rows,), generator=rng)
            for codes in spec.cardinalities
        ]
        inputs.append(torch.stack(columns, dim=1))
    return tuple(inputs)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
