"""Which rows are in which split and batch, and whether parties hold the same ones.

Splits and batches are derived from a shared seed: every party computes the same rows by
itself, so no row number travels.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError, require
from flower_vfl.randomness import derive_seed, generator

TRAIN, VALID, TEST = 0, 1, 2
SPLITS = {"train": TRAIN, "valid": VALID, "test": TEST}


def split_rows(
    rows: int, seed: int, test_fraction: float = 0.2, valid_fraction: float = 0.0
) -> NDArray[np.int8]:
    """Return for each row whether it is for training, validation or testing."""
    for name, value in (("test", test_fraction), ("valid", valid_fraction)):
        require(0.0 <= value < 1.0, f"{name}_fraction", "in [0, 1)", value)
    test, valid = round(rows * test_fraction), round(rows * valid_fraction)
    if rows - test - valid < 1:
        given = f"test_fraction={test_fraction} and valid_fraction={valid_fraction}"
        raise ConfigError(f"no training rows of {rows} are left with {given}; lower it")
    order = np.random.default_rng(derive_seed(seed, "splits")).permutation(rows)
    codes = np.full(rows, TRAIN, dtype=np.int8)
    codes[order[:test]] = TEST
    codes[order[test : test + valid]] = VALID
    return codes


@dataclass(frozen=True)
class Plan:
    """The settings from which every party derives its rows."""

    seed: int
    batch_size: int
    evaluation_rows: int = 8192


class Schedule:
    """Rows of each batch of each split."""

    def __init__(
        self, codes: NDArray[np.int8], plan: Plan, device: torch.device | None = None
    ) -> None:
        if not np.isin(codes, list(SPLITS.values())).all():
            raise ConfigError(f"a split has codes other than {SPLITS}; give only these")
        self.plan = plan
        self._device = device
        self._rows = {
            name: torch.from_numpy(np.flatnonzero(codes == code)).to(device)
            for name, code in SPLITS.items()
        }

    def size(self, split: str) -> int:
        """Return the number of rows of a split."""
        return len(self._rows[split])

    def rows(self, split: str) -> Tensor:
        """Return the rows of a split, in order."""
        return self._rows[split]

    def batches(self, split: str, training: bool = False) -> int:
        """Return the number of batches of a split."""
        return count_batches(self.size(split), self._size_of_batch(split, training))

    def training_batches(self, epoch: int) -> list[Tensor]:
        """Return the rows of every training batch of an epoch, which counts from 1."""
        rows, stream = self._rows["train"], generator(self.plan.seed, "batches", epoch)
        order = torch.randperm(len(rows), generator=stream).to(self._device)
        return _cut(rows[order], self._size_of_batch("train", True))

    def evaluation_rows(self, split: str, index: int) -> Tensor:
        """Return the rows of one part of an evaluation, in order."""
        parts = _cut(self._rows[split], self._size_of_batch(split, False))
        if not 0 <= index < len(parts):
            raise ConfigError(f"there is no batch {index}: the split has {len(parts)}")
        return parts[index]

    def _size_of_batch(self, split: str, training: bool) -> int:
        size = self.plan.batch_size if training else self.plan.evaluation_rows
        return size or max(self.size(split), 1)


def _cut(rows: Tensor, size: int) -> list[Tensor]:
    batches = count_batches(len(rows), size)
    ends = [index * size for index in range(1, batches)]
    return list(rows.tensor_split(ends)) if len(rows) else []


def count_batches(rows: int, size: int) -> int:
    """Return how many batches of a size the rows make."""
    full, rest = divmod(rows, size)
    return full + (rest > 1 or (rest == 1 and full == 0))


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
