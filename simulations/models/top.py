"""Top models: from the aggregated cut layers to the label party's logits."""

from math import prod

from torch import nn

from flower_vfl.errors import ConfigError

from .cnn import conv_layers
from .layers import dense_layers


def identity_top(in_width: int, out_width: int) -> nn.Module:
    """Return no layers: the parties' summed outputs are the logits."""
    if in_width != out_width:
        raise ConfigError(
            f"without a top model the summed cut layers are the logits: the cut width "
            f"must be {out_width}, got {in_width}"
        )
    return nn.Identity()


def linear_top(in_width: int, out_width: int) -> nn.Module:
    """Return one linear layer."""
    return nn.Linear(in_width, out_width)


class MLPTop(nn.Sequential):
    """Hidden layers, then a linear layer.

    Parameters
    ----------
    in_width : int
        Width of the aggregated cut layers.
    out_width : int
        Number of logits.
    hidden : tuple[int, ...] (default: (64,))
        Width of each hidden layer.
    activation : str (default: "relu")
        Activation of the hidden layers, a name of ``ACTIVATIONS``.
    dropout : float (default: 0.0)
        Dropout after each hidden layer.
    batch_norm : bool (default: False)
        Whether each hidden layer has a batch norm before its activation.

    Examples
    --------
    >>> import torch
    >>> MLPTop(in_width=16, out_width=1, hidden=(8,))(torch.zeros(2, 16)).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        hidden: tuple[int, ...] = (64,),
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        layers = dense_layers(
            in_width, hidden, out_width, activation, dropout, batch_norm
        )
        super().__init__(*layers)


def cnn_top(
    in_width: int,
    out_width: int,
    shape: tuple[int, int, int] = (64, 5, 5),
    channels: tuple[int, ...] = (64, 64),
    hidden: tuple[int, ...] = (64,),
) -> nn.Module:
    """Label Leakage and Protection in Two-party Split Learning (Li et al., 2022), ISIC.

    https://arxiv.org/abs/2102.08504, appendix A.6.2: the layers after the cut of
    ``marvell-cnn``, two convolutions, a hidden layer and the logit.
    """
    if in_width != prod(shape):
        raise ConfigError(
            f"maps of shape {shape} have {prod(shape)} columns at the cut layer, but "
            f"{in_width} come in; set shape=channels+height+width"
        )
    convolutions, out_shape = conv_layers(shape, channels)
    return nn.Sequential(
        nn.Unflatten(1, shape),
        *convolutions,
        nn.Flatten(),
        *dense_layers(prod(out_shape), hidden, out_width),
    )
