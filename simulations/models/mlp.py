"""Fully connected bottom models, and Wide & Deep models for categorical columns."""

from math import prod
from typing import ClassVar

from torch import Tensor, nn

from flower_vfl.simulations.datasets.types import InputSpec

from .layers import (
    BottomModel,
    TableEncoder,
    activation_layer,
    dense_layers,
    normalise_image,
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
    to the label party: ``wide=False, final="relu"`` and a width of 128.

    Parameters
    ----------
    spec : InputSpec
        The party's columns.
    width : int
        Width of the cut layer.
    hidden : tuple[int, ...] (default: (128, 128))
        Width of each hidden layer of the deep part.
    embedding : int (default: 4)
        Width of each categorical column's embedding in the deep part.
    wide : bool (default: True)
        Whether the model has the wide part.
    activation : str (default: "relu")
        Activation of the hidden layers, a name of ``ACTIVATIONS``.
    dropout : float (default: 0.0)
        Dropout after each hidden layer.
    batch_norm : bool (default: False)
        Whether each hidden layer has a batch norm before its activation.
    final : str (default: "none")
        Activation of the cut layer, after the sum; a name of ``ACTIVATIONS``.

    Examples
    --------
    >>> import torch
    >>> model = WideDeep(InputSpec(numeric=3, cardinalities=(10, 4)), width=8)
    >>> model(torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64)).shape
    torch.Size([2, 8])
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
