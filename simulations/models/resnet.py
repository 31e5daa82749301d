"""The ResNet-20 that He et al. trained on CIFAR-10."""

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets.types import InputSpec

from .layers import BottomModel, activation_layer, normalise_image

STAGES = (16, 32, 64)
BLOCKS_PER_STAGE = 3


class PaddedShortcut(nn.Module):
    """Option A: take every ``stride``-th pixel, fill new channels with zeros."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return the thinned image with half of the zero channels on either side."""
        before = self.extra // 2
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, before, self.extra - before))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm, and a shortcut around them."""

    def __init__(self, inside: int, outside: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut: nn.Module
        if stride == 1 and inside == outside:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = PaddedShortcut(outside - inside, stride)
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False),
                nn.BatchNorm2d(outside),
            )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out: Tensor = self.activation(self.residual(x) + self.shortcut(x))
        return out


class ResNet20(BottomModel):
    """Deep Residual Learning for Image Recognition (He et al., 2016), section 4.2.

    https://arxiv.org/abs/1512.03385. A 3×3 convolution, three stages of three
    residual blocks with 16, 32 and 64 channels, global average pooling and a linear
    layer to the cut. LADSG uses it for images.

    Because of its batch norms, a training batch of one row fails on strips of at most
    4×4 pixels, where each channel has a single value.

    Parameters
    ----------
    spec : InputSpec
        The party's image, of any height and width.
    width : int
        Width of the cut layer.
    shortcut : str (default: "A")
        Where a stage changes the shape, ``"A"`` pads with zero channels and has no
        parameters, as He et al. did on CIFAR-10; ``"B"`` is a 1×1 convolution.
    final : str (default: "none")
        Activation of the cut layer, a name of ``ACTIVATIONS``.

    Examples
    --------
    >>> model = ResNet20(InputSpec(image=(3, 32, 32)), width=10)
    >>> sum(parameter.numel() for parameter in model.parameters())
    269722
    """

    takes: ClassVar[frozenset[str]] = frozenset({"image"})

    def __init__(
        self,
        spec: InputSpec,
        width: int,
        shortcut: Literal["A", "B"] = "A",
        final: str = "none",
    ) -> None:
        super().__init__(spec, width)
        assert spec.image is not None
        if shortcut not in ("A", "B"):
            raise ConfigError(f"shortcut must be 'A' or 'B', got '{shortcut}'")
        inside = STAGES[0]
        self.stem = nn.Sequential(
            nn.Conv2d(spec.image[0], inside, 3, padding=1, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(),
        )
        blocks: list[nn.Module] = []
        for stage, outside in enumerate(STAGES):
            for block in range(BLOCKS_PER_STAGE):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(ResidualBlock(inside, outside, stride, shortcut))
                inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(inside, width),
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
