"""Gradients at every layer of a model, for measuring what they leak."""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from torch import Tensor, nn


class LayerProbe(ExitStack):
    """Keeps the gradient of every layer's output, once it is known.

    It looks at the layers while it is a context; gradients arrive afterwards too.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._layers = {
            name or type(model).__name__: module
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        self._calls = Counter[str]()
        self._found: dict[str, Tensor | None] = {}  # in the order of the forward pass

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients by layer, in the order of the forward pass."""
        return {use: g for use, g in self._found.items() if g is not None}

    def __enter__(self) -> Self:
        """Look at every layer from now on."""
        for name, module in self._layers.items():
            hook = partial(self._look, name)
            self.enter_context(module.register_forward_hook(hook))
        return self

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._calls[name] += 1
        count = self._calls[name]
        use = name if count == 1 else f"{name}#{count}"

        def keep(gradient: Tensor) -> None:
            self._found[use] = gradient.detach()

        if isinstance(output, Tensor) and output.requires_grad:
            self._found[use] = None
            output.register_hook(keep)  # type: ignore[no-untyped-call]
