"""Gradients at every layer of a model, for measuring what they leak."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class LayerProbe:
    """Keeps the gradient of every layer's output, once it is known."""

    def __init__(self, model: nn.Module) -> None:
        self._uses: list[str] = []
        self._found: dict[str, Tensor] = {}
        self._layers = {
            name or type(model).__name__: module
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        self._handles: list[RemovableHandle] = []

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients by layer, in the order of the forward pass."""
        return {use: self._found[use] for use in self._uses if use in self._found}

    def __enter__(self) -> LayerProbe:
        """Look at every layer from now on."""
        for name, module in self._layers.items():
            self._handles.append(module.register_forward_hook(self._watch(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look no longer; gradients of what was seen still arrive."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        count = 0

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal count
            count += 1
            use = name if count == 1 else f"{name}#{count}"

            def keep(gradient: Tensor) -> None:
                self._found[use] = gradient.detach()

            if isinstance(output, Tensor) and output.requires_grad:
                self._uses.append(use)
                output.register_hook(keep)  # type: ignore[no-untyped-call]

        return look
