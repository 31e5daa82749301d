"""A dataset divided by columns among the label party and the passive parties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError

from .divide import LabelShare, SplitLike, divide_columns
from .inputs import InputSpec
from .prepare import prepare_table
from .text import Weighting, prepare_text, vocabulary
from .types import Dataset, PartyData

_WORD_SEED = 0


def party_columns(
    dataset: Dataset,
    codes: NDArray[np.int8],
    parties: int,
    split: SplitLike = "even",
    label_share: LabelShare = 0.0,
    *,
    shuffle: int | None = None,
    max_features: int = 1000,
) -> list[tuple[str, ...]]:
    """Return the columns of the label party (first) and of each passive party.

    The columns of an image are its pixel columns ``x0``, ``x1``, ... from the left;
    those of a text are the words of its vocabulary. Words are always shuffled, so
    that every party gets common and rare ones.

    Parameters
    ----------
    dataset : Dataset
        What is divided.
    codes : NDArray[np.int8]
        The split of each row; the vocabulary of a text comes from training rows.
    parties : int
        Number of passive parties.
    split : SplitLike (default: "even")
        See :func:`divide_columns`.
    label_share : LabelShare (default: 0.0)
        See :func:`divide_columns`.
    shuffle : int | None (default: None)
        Seed to shuffle the columns with before they are divided; None leaves the
        columns of a table in order and shuffles words with the seed 0. An image
        cannot be shuffled.
    max_features : int (default: 1000)
        Size of the vocabulary of a text.
    """
    if dataset.table is not None:
        columns = tuple(map(str, dataset.table.columns))
    elif dataset.pictures is not None:
        columns = tuple(f"x{i}" for i in range(dataset.pictures.shape[2]))
    else:
        columns = vocabulary(dataset, codes, max_features)
    words = dataset.columns_are_words or dataset.text is not None
    seed = _WORD_SEED if words and shuffle is None else shuffle
    if seed is not None:
        if dataset.kind == "image":
            raise ConfigError("an image is cut into strips and cannot be shuffled")
        order = np.random.default_rng(seed).permutation(len(columns))
        columns = tuple(columns[i] for i in order)
    return divide_columns(columns, parties, split, label_share)


def prepare_party(
    dataset: Dataset,
    codes: NDArray[np.int8],
    columns: Sequence[str],
    *,
    min_count: int = 2,
    weighting: Weighting = "tfidf",
    max_features: int = 1000,
) -> PartyData:
    """Prepare the columns of one party, using no other columns.

    Parameters
    ----------
    dataset : Dataset
        What is divided.
    codes : NDArray[np.int8]
        The split of each row.
    columns : Sequence[str]
        The party's columns, as :func:`party_columns` returns them; may be empty.
    min_count : int (default: 2)
        See :func:`prepare_table`.
    weighting : Weighting (default: "tfidf")
        See :func:`prepare_text`.
    max_features : int (default: 1000)
        Size of the vocabulary of a text, as given to :func:`party_columns`.
    """
    if len(codes) != len(dataset):
        raise ConfigError(
            f"dataset '{dataset.name}' has {len(dataset)} rows but the split has "
            f"{len(codes)}"
        )
    if not columns:
        return PartyData((), None, ())
    if dataset.table is not None:
        return prepare_table(
            dataset.table[list(columns)],
            codes,
            log_columns=dataset.log_columns,
            min_count=min_count,
        )
    if dataset.pictures is not None:
        return _strip(dataset, columns)
    return prepare_text(
        dataset, codes, columns, weighting=weighting, max_features=max_features
    )


def vertical_split(
    dataset: Dataset,
    codes: NDArray[np.int8],
    parties: int,
    split: SplitLike = "even",
    label_share: LabelShare = 0.0,
    *,
    shuffle: int | None = None,
    min_count: int = 2,
    weighting: Weighting = "tfidf",
    max_features: int = 1000,
) -> list[PartyData]:
    """Divide the columns of a dataset among the label party and the passive parties.

    A process that plays one party needs only :func:`party_columns` and, for its own
    columns, :func:`prepare_party`.

    Parameters
    ----------
    dataset : Dataset
        What is divided.
    codes : NDArray[np.int8]
        The split of each row, as ``dataset.split`` returns it.
    parties : int
        Number of passive parties.
    split : SplitLike (default: "even")
        How the columns are divided among the passive parties: ``"even"`` or another
        string of :func:`parse_split`, fractions, widths, or names by party.
    label_share : LabelShare (default: 0.0)
        Fraction or names of the columns that the label party keeps for itself.
    shuffle : int | None (default: None)
        Seed to shuffle the columns with; see :func:`party_columns`.
    min_count : int (default: 2)
        Training rows that must share a category for it to get a code.
    weighting : Weighting (default: "tfidf")
        Numbers that stand for the words of a text: ``"tfidf"`` or ``"multihot"``.
    max_features : int (default: 1000)
        Size of the vocabulary of a text.

    Returns
    -------
    list[PartyData]
        The label party's share, which is empty by default, and then that of each
        passive party.
    """
    divided = party_columns(
        dataset,
        codes,
        parties,
        split,
        label_share,
        shuffle=shuffle,
        max_features=max_features,
    )
    return [
        prepare_party(
            dataset,
            codes,
            columns,
            min_count=min_count,
            weighting=weighting,
            max_features=max_features,
        )
        for columns in divided
    ]


def _strip(dataset: Dataset, columns: Sequence[str]) -> PartyData:
    """Cut neighbouring pixel columns out of the images."""
    positions = [int(column.removeprefix("x")) for column in columns]
    start, stop = positions[0], positions[-1] + 1
    if positions != list(range(start, stop)):
        raise ConfigError(
            "a party's part of an image must be a strip of neighbouring columns, got "
            f"{list(columns)}"
        )
    # A copy, because torch cannot hold the shared read-only array.
    strip = dataset.images[..., start:stop].copy()
    channels, height, width = strip.shape[1:]
    spec = InputSpec(image=(channels, height, width))
    return PartyData((torch.from_numpy(strip),), spec, tuple(columns))
