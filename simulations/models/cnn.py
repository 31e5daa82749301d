"""Convolutional bottom models."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets.types import InputSpec

from .layers import (
    BottomModel,
    activation_layer,
    dense_layers,
    normalise_image,
    positive,
)


def conv_layers(
    shape: tuple[int, int, int],
    channels: Sequence[int],
    kernel: int = 3,
    padding: bool = True,
    activation: str = "relu",
    batch_norm: bool = False,
) -> tuple[list[nn.Module], tuple[int, int, int]]:
    """Return convolutions, each with an activation and 2×2 max pooling."""
    positive("channels", *channels)
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel must be odd and at least 1, got {kernel}")
    inside, *sides = shape
    layers: list[nn.Module] = []
    for outside in channels:
        pads = [kernel // 2 if padding or side < kernel else 0 for side in sides]
        layers.append(nn.Conv2d(inside, outside, kernel, padding=(pads[0], pads[1])))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outside))
        layers.append(activation_layer(activation))
        sides = [
            side + 2 * pad - kernel + 1 for side, pad in zip(sides, pads, strict=True)
        ]
        windows = [min(side, 2) for side in sides]
        layers.append(nn.MaxPool2d((windows[0], windows[1])))
        sides = [side // window for side, window in zip(sides, windows, strict=True)]
        inside = outside
    return layers, (inside, sides[0], sides[1])


class CNN(BottomModel):
    """Convolutions with max pooling, then fully connected layers.

    The models of Marvell and GAFM for ISIC are special cases: see ``marvell-cnn`` and
    ``gafm-cnn`` in ``BOTTOM_MODELS``.

    Parameters
    ----------
    spec : InputSpec
        The party's image, of any height and width.
    width : int
        Width of the cut layer.
    channels : tuple[int, ...] (default: (16, 32, 64))
        Output channels of each convolution, at least one.
    kernel : int (default: 3)
        Side of the kernels, odd; the stride is 1.
    padding : bool (default: True)
        Whether the convolutions keep the height and the width.
    hidden : tuple[int, ...] (default: ())
        Width of each fully connected layer between the convolutions and the cut.
    linear : bool (default: True)
        Whether a linear layer leads to the cut layer. If not, the cut layer is the
        flattened output of the last pooling, and the width must be its size.
    activation : str (default: "relu")
        Activation of convolutions and hidden layers, a name of ``ACTIVATIONS``.
    dropout : float (default: 0.0)
        Dropout after each hidden layer.
    batch_norm : bool (default: False)
        Whether convolutions and hidden layers have a batch norm.
    final : str (default: "none")
        Activation of the cut layer, a name of ``ACTIVATIONS``.

    Examples
    --------
    >>> import torch
    >>> model = CNN(InputSpec(image=(3, 32, 16)), width=8, channels=(4, 4))
    >>> model(torch.zeros(2, 3, 32, 16, dtype=torch.uint8)).shape
    torch.Size([2, 8])
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
        final: str = "none",
    ) -> None:
        super().__init__(spec, width)
        assert spec.image is not None
        if not channels:
            raise ConfigError("a CNN needs at least one convolution in channels")
        layers, (maps, height, breadth) = conv_layers(
            spec.image, channels, kernel, padding, activation, batch_norm
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
        cut: Tensor = self.head(self.features(normalise_image(image)))
        return cut
