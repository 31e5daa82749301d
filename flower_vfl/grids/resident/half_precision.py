"""float32 values at half their size, and back.

torch is used where the process has it loaded already: it is twenty times as fast as
NumPy at this, and gives the same bits.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

LARGEST: Final = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
"""Largest finite value of each type."""
_PIECE: Final = 1 << 14


def fits(values: Floats, dtype: str) -> bool:
    """Return whether every finite value stays finite."""
    if np.abs(values).max(initial=0.0) <= LARGEST[dtype]:
        return True
    finite = values[np.isfinite(values)]
    return bool(np.abs(finite).max(initial=0.0) <= LARGEST[dtype])


def shrink(values: Floats, dtype: str) -> bytes:
    """Return the little-endian bytes of the nearest values of the type, ties to even."""
    bits: npt.NDArray[Any]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        bits = np.empty(len(values), dtype=np.int16)
        half = torch.from_numpy(bits).view(getattr(torch, dtype))
        # torch wants memory that it may write to.
        _copy_into(half, torch.from_numpy(np.array(values)))
    elif dtype == "float16":
        bits = values.astype(np.float16).view(np.int16)
    else:
        bits = _to_bfloat16(values)
    return bits.astype(bits.dtype.newbyteorder("<"), copy=False).tobytes()


def widen(data: memoryview, dtype: str) -> Floats:
    """Return the float32 values of what `shrink` returned."""
    bits = np.frombuffer(data, dtype="<u2")
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        half = torch.from_numpy(bits.astype(np.int16)).view(torch.float16)
        wide = np.empty(len(bits), dtype=np.float32)
        _copy_into(torch.from_numpy(wide), half)
        return wide
    return np.frombuffer(data, dtype="<f2").astype(np.float32)


def _copy_into(target: Any, source: Any) -> None:
    """Copy between tensors in pieces too small for torch to wake its threads."""
    for start in range(0, len(source), _PIECE):
        target[start : start + _PIECE] = source[start : start + _PIECE]


def _to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # Rounding could carry a NaN into an infinity; this is the NaN that torch gives.
    nan = np.uint32(0x7FC0) | ((bits >> 16) & np.uint32(0x8000))
    return np.where(np.isnan(values), nan, rounded).astype(np.uint16)
