"""Fully connected bottom models."""

from torch import Tensor, nn

from flower_vfl.simulations.datasets.types import InputSpec

from .layers import (
    BottomModel,
    ImageEncoder,
    TableEncoder,
    activation_layer,
    dense_layers,
)


class MLP(BottomModel):
    """Fully connected layers over a table's columns or an image's pixels.

    Models of several papers are special cases, named in ``BOTTOM_MODELS``.

    Parameters
    ----------
    spec : InputSpec
        The party's features; an image is flattened.
    width : int
        Width of the cut layer.
    hidden : tuple[int, ...] (default: (64,))
        Width of each hidden layer.
    activation : str (default: "relu")
        Activation of the hidden layers, a name of ``ACTIVATIONS``.
    dropout : float (default: 0.0)
        Dropout after each hidden layer.
    batch_norm : bool (default: False)
        Whether each hidden layer has a batch norm before its activation.
    final : str (default: "none")
        Activation of the cut layer, a name of ``ACTIVATIONS``.
    embedding : int (default: 4)
        Width of each categorical column's embedding.

    Examples
    --------
    >>> import torch
    >>> MLP(InputSpec(numeric=5), width=8, hidden=(16,))(torch.zeros(2, 5)).shape
    torch.Size([2, 8])
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
        self.encoder = (
            TableEncoder(spec, embedding) if spec.image is None else ImageEncoder(spec)
        )
        self.layers = nn.Sequential(
            *dense_layers(self.encoder.width, hidden, activation, dropout, batch_norm),
            nn.Linear(hidden[-1] if hidden else self.encoder.width, width),
            activation_layer(final),
        )
        self._first = 2 if hidden and batch_norm else 1

    @property
    def first_layer(self) -> nn.Module:
        """The first activation; the cut layer itself if there is no hidden layer."""
        return self.layers[self._first]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
        cut: Tensor = self.layers(self.encoder(*inputs))
        return cut
