"""Bottom models: fully connected, Wide & Deep, convolutional, ResNet-20."""

from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets.types import InputSpec

from .layers import (
    BottomModel,
    TableEncoder,
    activation_layer,
    conv_layers,
    dense_layers,
    normalise_image,
)


class MLP(BottomModel):
    """Fully connected layers over a table's columns or an image's pixels.

    Models of several papers are special cases, named in ``BOTTOM_MODELS``.
    """

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
        cut = self.final(cut)
        return cut


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
        layers, (maps, height, breadth) = conv_layers(
            (1, *spec.image[1:]) if self.gray else spec.image,
            channels,
            kernel,
            padding,
            activation,
            batch_norm,
            stride,
        )
        self.features = nn.Sequential(*layers, nn.Flatten())
        flat = maps * height * breadth
        if hidden and not linear:
            raise ConfigError("linear=false cannot be combined with hidden layers")
        if width != flat and not linear:
            raise ConfigError(
                f"without a linear layer an image of {spec.image} gives a cut layer "
                f"of {maps}×{height}×{breadth} = {flat} columns, not {width}; set the "
                f"width to {flat} or linear=true"
            )
        cut = width if linear else None
        self.head = nn.Sequential(
            *dense_layers(flat, hidden, cut, activation, dropout, batch_norm),
            activation_layer(final),
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
        (image,) = inputs
        pixels = normalise_image(image)
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
        self.stem = nn.Sequential(
            nn.Conv2d(spec.image[0], 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        shapes = [(16, 16, 1)] * 3  # channels before and after, and stride
        for before, after in ((16, 32), (32, 64)):
            shapes += [(before, after, 2), (after, after, 1), (after, after, 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(*shape) for shape in shapes))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, width),
            activation_layer(final),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
        (image,) = inputs
        cut: Tensor = self.head(self.blocks(self.stem(normalise_image(image))))
        return cut
