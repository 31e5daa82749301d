"""Tensors as Flower's arrays and back, fast.

Flower's own ``Array(ndarray)`` writes and parses an ``.npy`` header for each array. The
bytes made here are the same format, so every Flower tool can read them; only the header
is made once per shape.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from torch import Tensor

STYPE = "numpy.ndarray"


@lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the ``.npy`` header of a C-ordered array."""
    buffer = BytesIO()
    descr = npy.dtype_to_descr(np.dtype(dtype))
    npy.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as a Flower array; bfloat16 travels as float32.

    Parameters
    ----------
    tensor : Tensor
        Any tensor; it is detached and copied to the CPU.
    """
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    values = tensor.detach().cpu().contiguous().numpy()
    dtype, shape = str(values.dtype), tuple(values.shape)
    flat = values.reshape(-1)
    data = b"".join((_header(dtype, shape), flat.data if flat.size else b""))
    return Array(dtype=dtype, shape=shape, stype=STYPE, data=data)


def to_tensor(array: Array) -> Tensor:
    """Return a Flower array as a tensor of its own memory on the CPU.

    Parameters
    ----------
    array : Array
        An array that Flower or :func:`to_array` made.
    """
    shape = tuple(array.shape)
    try:
        header = _header(array.dtype, shape)
    except TypeError as error:
        raise ValueError(f"an array has the unknown dtype '{array.dtype}'") from error
    if array.stype == STYPE and array.data.startswith(header):
        flat = np.frombuffer(array.data, np.dtype(array.dtype), offset=len(header))
        if flat.size == np.prod(shape, dtype=np.int64):
            return torch.from_numpy(flat.reshape(shape).copy())
    return torch.from_numpy(array.numpy())
