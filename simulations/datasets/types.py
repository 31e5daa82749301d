"""What a loaded dataset and one party's share of it look like."""

from __future__ import annotations

import io
from collections.abc import Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TEST, TRAIN, VALID, split_rows
from flower_vfl.randomness import derive_seed

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from .inputs import InputSpec
    from .prepare import TableFit
    from .text import TextFit

Task = Literal["binary", "multiclass", "regression"]
Kind = Literal["table", "image", "text"]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images that are decoded at the first use, and then kept.

    Parameters
    ----------
    shape : tuple[int, int, int]
        Channels, height and width of each image.
    pixels : NDArray[np.uint8] | None (default: None)
        The images (N, H, W, C), where they are stored decoded.
    blob : NDArray[np.uint8] | None (default: None)
        JPEG files one after the other, where they are not.
    spans : NDArray[np.int64] | None (default: None)
        First and last-plus-one byte of each JPEG in ``blob`` (N, 2).
    """

    shape: tuple[int, int, int]
    pixels: NDArray[np.uint8] | None = None
    blob: NDArray[np.uint8] | None = None
    spans: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of images, without decoding any."""
        stored = self.spans if self.pixels is None else self.pixels
        return 0 if stored is None else len(stored)

    def take(self, rows: NDArray[np.int64]) -> Pictures:
        """Return the images of some rows, without decoding any."""
        if self.pixels is not None:
            return replace(self, pixels=self.pixels[rows])
        if self.spans is None:
            raise ConfigError("these pictures hold neither pixels nor JPEG files")
        return replace(self, spans=self.spans[rows])

    @cached_property
    def array(self) -> NDArray[np.uint8]:
        """The images (N, C, H, W), read-only."""
        channels, height, width = self.shape
        decoded = np.empty((len(self), height, width, channels), dtype=np.uint8)
        if self.pixels is not None:
            decoded[...] = self.pixels
        elif self.blob is not None and self.spans is not None:
            _decode_jpegs(self.blob, self.spans, decoded)
        ordered = np.ascontiguousarray(decoded.transpose(0, 3, 1, 2))
        ordered.setflags(write=False)
        return ordered


def _decode_jpegs(
    blob: NDArray[np.uint8], spans: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Decode each JPEG into its row of ``out``."""
    try:
        from PIL import Image  # optional: only the two JPEG datasets need it
    except ImportError as error:
        raise ConfigError(
            "this dataset is stored as JPEG files and needs pillow: "
            "pip install 'flower-vfl[sim]'"
        ) from error
    for row, (start, stop) in enumerate(spans):
        with Image.open(io.BytesIO(blob[start:stop].tobytes())) as image:
            out[row] = np.asarray(image)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset before it is divided among parties.

    One process shares one object among all its parties, so its arrays are
    read-only and its table must not be changed in place.

    Parameters
    ----------
    name : str
        Name in the registry.
    task : Task
        ``"binary"``, ``"multiclass"`` or ``"regression"``.
    classes : tuple[str, ...]
        Name of each class, in the order of the labels; empty for a regression.
    labels : NDArray[Any]
        ``int64`` classes from 0, or ``float32`` values of a regression.
    ids : NDArray[Any]
        Id of each row: that of the file where it has one, else the row number.
    table : pd.DataFrame | None (default: None)
        Feature columns: numbers are numeric, everything else is categorical.
    pictures : Pictures | None (default: None)
        Images, if the features are images.
    text : tuple[str, ...] | None (default: None)
        One text for each row, if the features are text.
    test_mask : NDArray[np.bool_] | None (default: None)
        Rows of the official test set, where there is one.
    groups : NDArray[np.int64] | None (default: None)
        Group of each row (a lesion, a patient); a split never divides a group.
    log_columns : tuple[str, ...] (default: ())
        Columns with a heavy tail, which are prepared on a logarithmic scale.
    columns_are_words : bool (default: False)
        Whether the columns are words from frequent to rare, which are shuffled
        before they are divided, so that each party gets some of both.
    """

    name: str
    task: Task
    classes: tuple[str, ...]
    labels: NDArray[Any]
    ids: NDArray[Any]
    table: pd.DataFrame | None = None
    pictures: Pictures | None = None
    text: tuple[str, ...] | None = None
    test_mask: NDArray[np.bool_] | None = None
    groups: NDArray[np.int64] | None = None
    log_columns: tuple[str, ...] = ()
    columns_are_words: bool = False

    def __post_init__(self) -> None:
        """Check that the parts fit together and protect the shared arrays."""
        parts: dict[str, Sized | None] = {
            "ids": self.ids,
            "table": self.table,
            "pictures": self.pictures,
            "text": self.text,
            "test_mask": self.test_mask,
            "groups": self.groups,
        }
        for part, value in parts.items():
            if value is not None and len(value) != len(self.labels):
                raise ConfigError(
                    f"dataset '{self.name}' has {len(self.labels)} labels but "
                    f"{len(value)} rows in its {part}"
                )
        if sum(x is not None for x in (self.table, self.pictures, self.text)) != 1:
            raise ConfigError(
                f"dataset '{self.name}' must have either a table, pictures or text"
            )
        for array in (self.labels, self.ids, self.test_mask, self.groups):
            if array is not None:
                array.setflags(write=False)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    @property
    def kind(self) -> Kind:
        """What the features are: ``"table"``, ``"image"`` or ``"text"``."""
        if self.table is not None:
            return "table"
        return "image" if self.pictures is not None else "text"

    @property
    def images(self) -> NDArray[np.uint8]:
        """The images (N, C, H, W), decoded at the first use; read-only."""
        if self.pictures is None:
            raise ConfigError(f"dataset '{self.name}' holds no images: {self.kind}")
        return self.pictures.array

    def take(self, rows: NDArray[np.int64]) -> Dataset:
        """Return the dataset of some rows."""
        return replace(
            self,
            labels=self.labels[rows],
            ids=self.ids[rows],
            table=None if self.table is None else self.table.iloc[rows],
            pictures=None if self.pictures is None else self.pictures.take(rows),
            text=None if self.text is None else tuple(self.text[i] for i in rows),
            test_mask=None if self.test_mask is None else self.test_mask[rows],
            groups=None if self.groups is None else self.groups[rows],
        )

    def split(
        self, seed: int, test_fraction: float = 0.2, valid_fraction: float = 0.0
    ) -> NDArray[np.int8]:
        """Return for each row whether it is for training, validation or testing.

        The official test rows are the test rows where the dataset has them. Where
        rows have groups, whole groups are drawn.
        """
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
    groups: NDArray[np.int64],
    seed: int,
    test_fraction: float = 0.2,
    valid_fraction: float = 0.0,
) -> NDArray[np.int8]:
    """Return a split of the rows that keeps each group in one part.

    Groups are drawn in a random order for the test rows, then for the validation
    rows; a group counts for the part in which its middle row falls, so that each
    part differs from its share by less than one group.

    Parameters
    ----------
    groups : NDArray[np.int64]
        Group of each row.
    seed : int
        The shared seed.
    test_fraction : float (default: 0.2)
        Share of test rows.
    valid_fraction : float (default: 0.0)
        Share of validation rows.
    """
    split_rows(len(groups), seed, test_fraction, valid_fraction)  # refuses bad shares
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
        raise ConfigError(
            f"no training rows are left: {len(names)} groups are too few for "
            f"test_fraction={test_fraction} and valid_fraction={valid_fraction}"
        )
    return codes


@dataclass(frozen=True, eq=False)
class PartyData:
    """One party's share of the columns, ready for its bottom model.

    Parameters
    ----------
    inputs : tuple[Tensor, ...]
        What the bottom model takes in, as :class:`InputSpec` describes it; empty
        for a party without features.
    spec : InputSpec | None
        The shape of the inputs; None for a party without features.
    columns : tuple[str, ...]
        Names of the raw columns that the party holds, in the order of the dataset's
        division.
    fit : TableFit | TextFit | None (default: None)
        What was learned from the training rows, to prepare new rows in the same
        way; None for images and for a party without features.
    """

    inputs: tuple[Tensor, ...]
    spec: InputSpec | None
    columns: tuple[str, ...]
    fit: TableFit | TextFit | None = None
