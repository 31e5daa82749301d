"""What every bottom model has in common."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets.types import InputSpec

from .layers import positive


def input_kind(spec: InputSpec) -> str:
    """Return ``"image"`` or ``"table"``."""
    return "table" if spec.image is None else "image"


class BottomModel(nn.Module, ABC):
    """One party's model from its features to the cut layer.

    It is called as ``model(*inputs)`` with the inputs that `InputSpec` describes and
    returns (B, width).

    Parameters
    ----------
    spec : InputSpec
        The party's features.
    width : int
        Width of the cut layer.

    Attributes
    ----------
    takes : frozenset[str]
        Which kinds of features the class can take: ``"table"``, ``"image"``.
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

    @property
    @abstractmethod
    def first_layer(self) -> nn.Module:
        """The module whose output is the first layer's activation.

        Marvell measures leakage there too: hook this module to see its gradient.
        """

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the cut layer (B, width)."""
