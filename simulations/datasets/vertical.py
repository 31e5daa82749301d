"""A dataset divided by columns among the label party and the passive parties."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TRAIN

from .divide import divide_columns
from .prepare import prepare_table
from .types import Dataset, InputSpec, PartyData

_VOCABULARY = 1000  # the commonest words of the training rows
_WORD_SEED = 0


def party_columns(
    dataset: Dataset,
    codes: NDArray[np.int8],
    parties: int,
    split: str = "even",
    label_share: float | str = 0.0,
) -> list[tuple[str, ...]]:
    """Return the columns of the label party (first) and of each passive party.

    The columns of an image are its pixel columns ``x0``, ``x1``, ... from the left.
    The columns of a text are the words of its vocabulary. Words are shuffled, so that
    every party gets common and rare ones.
    """
    if dataset.table is not None:
        columns = tuple(map(str, dataset.table.columns))
    elif dataset.pictures is not None:
        columns = tuple(f"x{i}" for i in range(dataset.pictures.shape[2]))
    else:
        columns, _ = _word_counts(dataset, codes.tobytes())
    if dataset.columns_are_words or dataset.text is not None:
        order = np.random.default_rng(_WORD_SEED).permutation(len(columns))
        columns = tuple(columns[i] for i in order)
    return divide_columns(columns, parties, split, label_share)


def prepare_party(
    dataset: Dataset, codes: NDArray[np.int8], columns: Sequence[str]
) -> PartyData:
    """Prepare the columns of one party, using no other columns."""
    if len(codes) != len(dataset):
        raise ConfigError(
            f"dataset '{dataset.name}' has {len(dataset)} rows but the split has "
            f"{len(codes)}"
        )
    if not columns:
        return PartyData((), None, ())
    if dataset.table is not None:
        own = dataset.table[list(columns)]
        return prepare_table(own, codes, log_columns=dataset.log_columns)
    if dataset.pictures is not None:
        return _strip(dataset, columns)
    return _tfidf(dataset, codes, columns)


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


def _tfidf(
    dataset: Dataset, codes: NDArray[np.int8], words: Sequence[str]
) -> PartyData:
    """Return the TF-IDF values of one party's words, as if it knew no others."""
    known, counts = _word_counts(dataset, codes.tobytes())
    position = {word: index for index, word in enumerate(known)}
    own = counts[:, [position[word] for word in words]]
    weights = TfidfTransformer().fit(own[codes == TRAIN])
    inputs = torch.from_numpy(weights.transform(own).toarray().astype(np.float32))
    return PartyData((inputs,), InputSpec(numeric=len(words)), tuple(words))


# Cached because every party of a process needs the same counts.
@lru_cache(maxsize=4)
def _word_counts(dataset: Dataset, codes: bytes) -> tuple[tuple[str, ...], Any]:
    """Return the commonest words of the training rows, and each row's word counts."""
    assert dataset.text is not None  # it is no table and has no pictures
    train = np.flatnonzero(np.frombuffer(codes, dtype=np.int8) == TRAIN)
    vectorizer = CountVectorizer(max_features=_VOCABULARY)
    vectorizer.fit([dataset.text[row] for row in train])
    words = tuple(str(word) for word in vectorizer.get_feature_names_out())
    return words, vectorizer.transform(dataset.text).tocsr()
