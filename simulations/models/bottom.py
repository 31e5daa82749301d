"""Bottom models: fully connected, Wide & Deep, convolutional, ResNet-20."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
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
        both = zip(sides, pads, strict=True)
        sides = [(side + 2 * pad - kernel) // stride + 1 for side, pad in both]
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
        raise ConfigError(f"an image must arrive as uint8, unscaled, not {image.dtype}")
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
            columns = f"{self.numeric} numeric and {len(self.embeddings)} categorical"
            given = f"{expected} tensor(s), got {len(inputs)}"
            raise ConfigError(f"a table with {columns} columns arrives as {given}")
        parts = [inputs[0]] if self.numeric else []
        if self.embeddings:
            both = zip(self.embeddings, inputs[-1].unbind(dim=1), strict=True)
            parts += [layer(column) for layer, column in both]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def input_kind(spec: InputSpec) -> str:
    """Return ``"image"`` or ``"table"``."""
    return "table" if spec.image is None else "image"


class BottomModel(nn.Module, ABC):
    """One party's model from its features to the cut layer.

    It is called as ``model(*inputs)`` with the inputs that `InputSpec` describes and
    returns (B, width).
    """

    takes: ClassVar[frozenset[str]] = frozenset({"table", "image"})  # its features

    def __init__(self, spec: InputSpec, width: int) -> None:
        super().__init__()
        if (kind := input_kind(spec)) not in self.takes:
            wanted = f"{type(self).__name__} takes {' or '.join(sorted(self.takes))}"
            raise ConfigError(f"{wanted} features; the party's are of kind '{kind}'")
        positive("the width of the cut layer", width)
        self.spec, self.width = spec, width

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""


class MLP(BottomModel):
    """Fully connected layers over a table's columns or an image's pixels."""

    def __init__(
        self,
        spec: InputSpec,
        width: int,
        hidden: tuple[int, ...] = (64,),
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        final: str = "none",
        embedding: int = 4,
    ) -> None:
        super().__init__(spec, width)
        self.encoder = TableEncoder(spec, embedding) if spec.image is None else None
        columns = prod(spec.image or ()) if self.encoder is None else self.encoder.width
        self.layers = nn.Sequential(
            *dense_layers(columns, hidden, width, activation, dropout, batch_norm),
            activation_layer(final),
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
        if self.encoder is None:
            rows = normalise_image(*inputs).flatten(1)
        else:
            rows = self.encoder(*inputs)
        cut: Tensor = self.layers(rows)
        return cut


class WideDeep(BottomModel):
    """Wide & Deep Learning for Recommender Systems (Cheng et al., 2016).

    https://arxiv.org/abs/1606.07792, in the form that Li et al. (2022) use for Criteo
    and Avazu. The deep part embeds each categorical column, joins the numeric columns
    and applies hidden layers. The wide part is linear in one-dimensional embeddings
    and the numeric columns. The two are summed at the cut layer.

    Li et al. cut after the third ReLU layer of the deep part and leave the wide part
    to the label party: ``wide=False, final="relu"`` and a width of 128 here, and there
    ``mlp:hidden=none,embedding=1`` with a width of 1.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"table"})

    def __init__(
        self,
        spec: InputSpec,
        width: int,
        hidden: tuple[int, ...] = (128, 128),
        embedding: int = 4,
        wide: bool = True,
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        final: str = "none",
    ) -> None:
        super().__init__(spec, width)
        self.deep_encoder = TableEncoder(spec, embedding)
        columns = self.deep_encoder.width
        self.deep = nn.Sequential(
            *dense_layers(columns, hidden, width, activation, dropout, batch_norm)
        )
        self.wide_encoder = TableEncoder(spec, 1) if wide else None
        if self.wide_encoder is not None:
            self.wide = nn.Linear(self.wide_encoder.width, width)
        self.final = activation_layer(final)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
        cut: Tensor = self.deep(self.deep_encoder(*inputs))
        if self.wide_encoder is not None:
            cut = cut + self.wide(self.wide_encoder(*inputs))
        final: Tensor = self.final(cut)
        return final


class CNN(BottomModel):
    """Convolutions with max pooling or a stride, then fully connected layers.

    The models of Marvell and GAFM for ISIC are special cases: see ``marvell-cnn`` and
    ``gafm-cnn`` in ``BOTTOM_MODELS``. With `gray` it sees the brightness of a picture
    only. Without `linear` the cut layer is the flattened
    output of the last pooling, and the width must be its size.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"image"})

    def __init__(
        self,
        spec: InputSpec,
        width: int,
        channels: tuple[int, ...] = (16, 32, 64),
        kernel: int = 3,
        padding: bool = True,
        hidden: tuple[int, ...] = (),
        linear: bool = True,
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        stride: int = 1,
        final: str = "none",
        gray: bool = False,
    ) -> None:
        super().__init__(spec, width)
        assert spec.image is not None
        self.gray = gray and spec.image[0] == 3
        if not channels:
            raise ConfigError("a CNN needs at least one convolution in channels")
        shape = (1, *spec.image[1:]) if self.gray else spec.image
        settings = kernel, padding, activation, batch_norm, stride
        layers, maps = conv_layers(shape, channels, *settings)
        self.features, flat = nn.Sequential(*layers, nn.Flatten()), prod(maps)
        if hidden and not linear:
            raise ConfigError("linear=false cannot be combined with hidden layers")
        if width != flat and not linear:
            size = f"{'×'.join(map(str, maps))} = {flat} columns, not {width}"
            raise ConfigError(
                f"without a linear layer an image of {spec.image} gives a cut layer of "
                f"{size}; set the width to {flat} or linear=true"
            )
        cut = width if linear else None
        self.head = nn.Sequential(
            *dense_layers(flat, hidden, cut, activation, dropout, batch_norm),
            activation_layer(final),
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
        pixels = normalise_image(*inputs)
        if self.gray:  # luma of ITU-R 601-2, as in Pillow
            luma = pixels.new_tensor([0.299, 0.587, 0.114])
            pixels = torch.einsum("bchw,c->bhw", pixels, luma).unsqueeze(1)
        cut: Tensor = self.head(self.features(pixels))
        return cut


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm, and a shortcut around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, outside - inside
        self.residual = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )

    def shortcut(self, x: Tensor) -> Tensor:
        """Option A: take every ``stride``-th pixel, fill new channels with zeros."""
        before = self.extra // 2
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, before, self.extra - before))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return F.relu(self.residual(x) + self.shortcut(x))


class ResNet20(BottomModel):
    """Deep Residual Learning for Image Recognition (He et al., 2016), section 4.2.

    https://arxiv.org/abs/1512.03385. A 3×3 convolution, three stages of three
    residual blocks with 16, 32 and 64 channels, global average pooling and a linear
    layer to the cut. Where a stage changes the shape, the shortcut pads with zero
    channels, as He et al. did on CIFAR-10. LADSG uses it for images.

    Because of its batch norms, a training batch of one row fails on strips of at most
    4×4 pixels, where each channel has a single value.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"image"})

    def __init__(self, spec: InputSpec, width: int, final: str = "none") -> None:
        super().__init__(spec, width)
        assert spec.image is not None
        first = nn.Conv2d(spec.image[0], 16, 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU())
        shapes = [(16, 16, 1)] * 3  # channels before and after, and stride
        for before, after in ((16, 32), (32, 64)):
            shapes += [(before, after, 2), (after, after, 1), (after, after, 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(*shape) for shape in shapes))
        pool, last = (nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(64, width)
        self.head = nn.Sequential(*pool, last, activation_layer(final))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
        cut: Tensor = self.head(self.blocks(self.stem(normalise_image(*inputs))))
        return cut
