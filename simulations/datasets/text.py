"""Text as a bag of words, whose words are divided among the parties."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import CountVectorizer

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TRAIN

from .types import Dataset, InputSpec, PartyData

_VOCABULARY = 1000  # the commonest words of the training rows


def vocabulary(dataset: Dataset, codes: NDArray[np.int8]) -> tuple[str, ...]:
    """Return the commonest words of the training rows, in alphabetical order."""
    words, _ = _count(dataset, codes.tobytes())
    return words


def prepare_text(
    dataset: Dataset, codes: NDArray[np.int8], words: Sequence[str]
) -> PartyData:
    """Return the TF-IDF values of one party's words, as if it knew no others."""
    known, counts = _count(dataset, codes.tobytes())
    position = {word: index for index, word in enumerate(known)}
    own = counts[:, [position[word] for word in words]]
    train = own[np.flatnonzero(codes == TRAIN)]
    frequency = np.asarray((train > 0).sum(axis=0)).ravel()
    idf = np.log((1 + train.shape[0]) / (1 + frequency)) + 1
    dense = own.toarray().astype(np.float32) * idf.astype(np.float32)
    length = np.linalg.norm(dense, axis=1, keepdims=True)
    inputs = torch.from_numpy(dense / np.where(length == 0, 1, length))
    return PartyData((inputs,), InputSpec(numeric=len(words)), tuple(words))


# Cached because every party of a process needs the same counts.
@lru_cache(maxsize=4)
def _count(dataset: Dataset, codes: bytes) -> tuple[tuple[str, ...], Any]:
    """Return the vocabulary and the sparse matrix of word counts."""
    if dataset.text is None:
        raise ConfigError(f"dataset '{dataset.name}' holds no text: {dataset.kind}")
    train = np.flatnonzero(np.frombuffer(codes, dtype=np.int8) == TRAIN)
    vectorizer = CountVectorizer(max_features=_VOCABULARY)
    vectorizer.fit([dataset.text[row] for row in train])
    words = tuple(str(word) for word in vectorizer.get_feature_names_out())
    return words, vectorizer.transform(dataset.text).tocsr()
