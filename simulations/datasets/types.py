"""What a loaded dataset and one party's share of it look like."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task
from flower_vfl.parties.schedule import TEST, TRAIN, VALID, split_rows
from flower_vfl.randomness import derive_seed

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from .prepare import TableFit


@dataclass(frozen=True)
class InputSpec:
    """The shape of one party's features: either a table or an image.

    A bottom model is called as ``model(*inputs)``. For an image the inputs are one
    ``uint8`` tensor (B, C, H, W). For a table they are the numeric columns as
    ``float32`` (B, numeric), if any, then the categorical columns as ``int64`` codes
    (B, len(cardinalities)), if any.
    """

    numeric: int = 0
    cardinalities: tuple[int, ...] = ()  # number of codes of each categorical column
    image: tuple[int, int, int] | None = None  # channels, height and width

    def __post_init__(self) -> None:
        table = self.numeric > 0 or bool(self.cardinalities)
        if table == (self.image is not None):
            raise ValueError(f"a spec is either a table or an image, got {self!r}")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images (N, H, W, C), or as many JPEG files that are decoded when first used."""

    shape: tuple[int, int, int]
    stored: NDArray[Any]

    def __len__(self) -> int:
        return len(self.stored)

    def take(self, rows: NDArray[np.int64]) -> Pictures:
        """Return the images of some rows without decoding them."""
        return replace(self, stored=self.stored[rows])

    @cached_property
    def array(self) -> NDArray[np.uint8]:
        """The images (N, C, H, W), read-only."""
        decoded = self.stored
        if decoded.dtype == object:
            channels, height, width = self.shape
            decoded = np.empty((len(self), height, width, channels), dtype=np.uint8)
            for row, file in enumerate(self.stored):
                decoded[row] = _decoded(file)
        ordered = np.array(decoded.transpose(0, 3, 1, 2), order="C")
        ordered.setflags(write=False)
        return ordered


def _decoded(file: bytes) -> NDArray[np.uint8]:
    try:
        from PIL import Image  # optional: only the two JPEG datasets need it
    except ImportError as error:
        remedy = "pip install 'flower-vfl[sim]'"
        raise ConfigError(f"this dataset's JPEG files need pillow: {remedy}") from error
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image, dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset before it is divided among parties.

    All parties of a process share one object, so its arrays are read-only and its
    table must not be changed in place.
    """

    name: str
    task: Task
    classes: tuple[str, ...]  # in the order of the labels; empty for a regression
    labels: NDArray[Any]  # int64 classes from 0, or float32 values of a regression
    ids: NDArray[Any]  # from the file if it has ids, else the row numbers
    table: pd.DataFrame | None = None  # a column that is not numeric is categorical
    pictures: Pictures | None = None
    text: tuple[str, ...] | None = None  # one for each row
    test_mask: NDArray[np.bool_] | None = None  # rows of the official test set
    groups: NDArray[np.int64] | None = None  # a split never divides a group
    log_columns: tuple[str, ...] = ()  # heavy tails, for a logarithmic scale
    columns_are_words: bool = False  # from frequent to rare: shuffled before divided

    def __post_init__(self) -> None:
        features = self._present("table", "pictures", "text")
        for part, value in {**self._arrays(), **features}.items():
            if len(value) != len(self.labels):
                text = f"{len(self.labels)} labels but {len(value)} rows in its {part}"
                raise ConfigError(f"dataset '{self.name}' has {text}")
        if len(features) != 1:
            text = "must have either a table, pictures or text"
            raise ConfigError(f"dataset '{self.name}' {text}")
        for array in self._arrays().values():
            array.setflags(write=False)

    def _arrays(self) -> dict[str, Any]:
        return self._present("labels", "ids", "test_mask", "groups")

    def _present(self, *names: str) -> dict[str, Any]:
        return {n: found for n in names if (found := getattr(self, n)) is not None}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> NDArray[np.uint8]:
        """The images (N, C, H, W), read-only."""
        if self.pictures is None:
            raise ConfigError(f"dataset '{self.name}' holds no images")
        return self.pictures.array

    def take(self, rows: NDArray[np.int64]) -> Dataset:
        """Return the dataset of some rows."""
        parts = {name: part[rows] for name, part in self._arrays().items()}
        if self.table is not None:
            parts["table"] = self.table.iloc[rows]
        if self.pictures is not None:
            parts["pictures"] = self.pictures.take(rows)
        if self.text is not None:
            parts["text"] = tuple(self.text[i] for i in rows)
        return replace(self, **parts)

    def split(
        self, seed: int, test_fraction: float = 0.2, valid_fraction: float = 0.0
    ) -> NDArray[np.int8]:
        """Return the split of the rows: the official test set, and whole groups."""
        if self.test_mask is None:
            rows, test = np.arange(len(self)), test_fraction
        else:
            rows, test = np.flatnonzero(~self.test_mask), 0.0
        codes = np.full(len(self), TEST, dtype=np.int8)
        if self.groups is None:
            codes[rows] = split_rows(len(rows), seed, test, valid_fraction)
        else:
            codes[rows] = split_groups(self.groups[rows], seed, test, valid_fraction)
        return codes


def split_groups(
    groups: NDArray[np.int64], seed: int, test_fraction: float, valid_fraction: float
) -> NDArray[np.int8]:
    """Return a split of the rows that keeps each group in one part."""
    split_rows(len(groups), seed, test_fraction, valid_fraction)  # checks the fractions
    names, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.random.default_rng(derive_seed(seed, "splits")).permutation(len(names))
    middle = np.cumsum(sizes[order]) - sizes[order] / 2
    test, valid = len(groups) * test_fraction, len(groups) * valid_fraction
    drawn = np.full(len(names), TRAIN, dtype=np.int8)
    drawn[middle < test + valid] = VALID
    drawn[middle < test] = TEST
    by_group = np.empty(len(names), dtype=np.int8)
    by_group[order] = drawn
    codes: NDArray[np.int8] = by_group[member]
    if not (codes == TRAIN).any():
        held = f"test_fraction={test_fraction} and valid_fraction={valid_fraction}"
        text = f"{len(names)} groups are too few for {held}"
        raise ConfigError(f"no training rows are left: {text}")
    return codes


@dataclass(frozen=True, eq=False)
class PartyData:
    """One party's share of the columns, ready for its bottom model."""

    inputs: tuple[Tensor, ...]  # empty for a party without features
    spec: InputSpec | None
    columns: tuple[str, ...]  # names of the raw columns
    fit: TableFit | None = None  # prepares new rows of a table in the same way
