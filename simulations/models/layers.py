"""The base class of bottom models, and building blocks that models share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.simulations.datasets.types import InputSpec

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "leaky-relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def activation_layer(name: str) -> nn.Module:
    """Return a new activation module."""
    check_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]()


def dense_layers(
    in_width: int,
    hidden: Sequence[int],
    out_width: int | None,
    activation: str = "relu",
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> list[nn.Module]:
    """Return hidden layers, then a linear layer unless its width is None."""
    require(0.0 <= dropout < 1.0, "dropout", "at least 0 and below 1", dropout)
    positive("hidden", *hidden)
    layers: list[nn.Module] = []
    for units in hidden:
        layers.append(nn.Linear(in_width, units))
        if batch_norm:
            layers.append(nn.BatchNorm1d(units))
        layers.append(activation_layer(activation))
        if dropout > 0.0:
            layers.append(nn.Dropout(dropout))
        in_width = units
    return layers if out_width is None else [*layers, nn.Linear(in_width, out_width)]


def conv_layers(
    shape: tuple[int, int, int],
    channels: Sequence[int],
    kernel: int = 3,
    padding: bool = True,
    activation: str = "relu",
    batch_norm: bool = False,
    stride: int = 1,
) -> tuple[list[nn.Module], tuple[int, int, int]]:
    """Return convolutions with an activation, and 2×2 max pooling if `stride` is 1."""
    positive("channels", *channels)
    positive("stride", stride)
    require(kernel > 0 and kernel % 2 == 1, "kernel", "odd and at least 1", kernel)
    inside, *sides = shape
    layers: list[nn.Module] = []
    # max pooling commutes with increasing functions, which then have a quarter to do
    increasing = activation not in ("none", "gelu")
    for outside in channels:
        pads = [kernel // 2 if padding or side < kernel else 0 for side in sides]
        padded = (pads[0], pads[1])
        layers.append(nn.Conv2d(inside, outside, kernel, stride, padding=padded))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outside))
        sides = [
            (side + 2 * pad - kernel) // stride + 1
            for side, pad in zip(sides, pads, strict=True)
        ]
        inside = outside
        order: list[nn.Module] = [activation_layer(activation)]
        if stride == 1:
            windows = [min(side, 2) for side in sides]
            order.append(nn.MaxPool2d((windows[0], windows[1])))
            sides = [side // size for side, size in zip(sides, windows, strict=True)]
        layers += reversed(order) if increasing else order
    return layers, (inside, sides[0], sides[1])


def positive(what: str, *values: int) -> None:
    """Refuse sizes below 1."""
    for value in values:
        require(value >= 1, what, "at least 1", value)


def normalise_image(image: Tensor) -> Tensor:
    """Map ``uint8`` pixels from 0..255 to -1..1, in the faster channels-last layout."""
    if image.dtype != torch.uint8:
        raise ConfigError(
            f"an image must arrive as uint8 (B, C, H, W), got {image.dtype}; the "
            "model scales it itself"
        )
    pixels = image.float().contiguous(memory_format=torch.channels_last)
    return pixels.div_(127.5).sub_(1.0)


class TableEncoder(nn.Module):
    """Joins numeric columns and embeddings of categorical columns."""

    def __init__(self, spec: InputSpec, embedding: int) -> None:
        super().__init__()
        positive("embedding", embedding)
        self.numeric = spec.numeric
        self.width = spec.numeric + embedding * len(spec.cardinalities)
        self.embeddings = nn.ModuleList(
            nn.Embedding(codes, embedding) for codes in spec.cardinalities
        )
        for weight in self.embeddings.parameters():
            nn.init.zeros_(weight[0])

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the rows as vectors (B, width)."""
        expected = int(self.numeric > 0) + int(len(self.embeddings) > 0)
        if len(inputs) != expected:
            raise ConfigError(
                f"a table with {self.numeric} numeric and {len(self.embeddings)} "
                f"categorical columns arrives as {expected} tensor(s), got "
                f"{len(inputs)}"
            )
        parts = [inputs[0]] if self.numeric else []
        if self.embeddings:
            codes = inputs[-1].unbind(dim=1)
            parts += [
                layer(column)
                for layer, column in zip(self.embeddings, codes, strict=True)
            ]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def input_kind(spec: InputSpec) -> str:
    """Return ``"image"`` or ``"table"``."""
    return "table" if spec.image is None else "image"


class BottomModel(nn.Module, ABC):
    """One party's model from its features to the cut layer.

    It is called as ``model(*inputs)`` with the inputs that `InputSpec` describes and
    returns (B, width). `takes` are the kinds of features that a class can take.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"table", "image"})

    def __init__(self, spec: InputSpec, width: int) -> None:
        super().__init__()
        kind = input_kind(spec)
        if kind not in self.takes:
            raise ConfigError(
                f"{type(self).__name__} takes {' or '.join(sorted(self.takes))} "
                f"features, but the party's features are of kind '{kind}'"
            )
        positive("the width of the cut layer", width)
        self.spec = spec
        self.width = width

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
