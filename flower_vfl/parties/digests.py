"""Digests by which parties find out that they hold the same rows in the same order."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def keyed_digest(values: Iterable[object], key: bytes) -> str:
    """Return a digest of an ordered list that tells nothing but equality."""
    digest = hashlib.blake2b(key=key, digest_size=16)
    for value in values:
        text = f"{type(value).__name__}:{value}".encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()


def plain_list(values: Sequence[object] | NDArray[Any]) -> list[object]:
    """Return Python objects, so that 1 and numpy's 1 have one digest."""
    if isinstance(values, np.ndarray):
        return list(values.tolist())
    return [v.item() if isinstance(v, np.generic) else v for v in values]
