"""Tensors as Flower's arrays and back, without work that nobody asked for.

Flower's own ``Array(ndarray)`` serialises at once. The array made here keeps the tensor
and makes its bytes when they are first read: on the way to another process they are, in
one process they never are. The bytes are Flower's ``.npy`` format, so every Flower tool
can read them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from torch import Tensor

from flower_vfl.errors import ConfigError

STYPE = "numpy.ndarray"


class TensorArray(Array):
    """A Flower array whose bytes are made when they are first read."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.bfloat16:  # numpy has no such type
            tensor = tensor.float()
        # Past Array's checks of four optional arguments, which cost more than the rest.
        self.__dict__.update(
            _tensor=tensor,
            dtype=_dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stype=STYPE,
        )

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        tensor: Tensor = self.__dict__["_tensor"]
        return tensor

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of an ``.npy`` file."""
        if "_data" not in self.__dict__:
            values = self.tensor.cpu().contiguous().numpy()
            flat = values.reshape(-1)
            parts = (_header(self.dtype, self.shape), flat.data if flat.size else b"")
            self.__dict__["_data"] = b"".join(parts)
        data: bytes = self.__dict__["_data"]
        return data

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        """Become one of Flower's own arrays in another process."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


# Flower writes the name of the class into what it sends and looks it up on arrival.
TensorArray.__name__ = TensorArray.__qualname__ = Array.__qualname__


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return numpy's name of a dtype, which is torch's too."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the ``.npy`` header of a C-ordered array."""
    buffer = BytesIO()
    descr = npy.dtype_to_descr(np.dtype(dtype))
    npy.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


def size_of(array: Array) -> int:
    """Return the bytes of an array's numbers, without making them."""
    return math.prod(array.shape) * _item_size(array.dtype)


@lru_cache
def _item_size(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as a Flower array; bfloat16 travels as float32."""
    return TensorArray(tensor.detach())


def to_tensor(array: Array) -> Tensor:
    """Return a Flower array as a tensor, which must not be changed in place."""
    if isinstance(array, TensorArray):
        return array.tensor
    shape = tuple(array.shape)
    try:
        header = _header(array.dtype, shape)
        if array.stype == STYPE and array.data.startswith(header):
            flat = np.frombuffer(array.data, np.dtype(array.dtype), offset=len(header))
            return torch.from_numpy(flat.reshape(shape).copy())
        return torch.from_numpy(array.numpy())
    except (TypeError, ValueError, EOFError, OSError) as error:
        raise ConfigError(
            f"an array of type {array.dtype} and shape {shape} cannot be read: {error}"
        ) from error
