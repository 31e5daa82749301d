"""Text as a bag of words, whose words are divided among the parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TRAIN

from .inputs import InputSpec
from .types import Dataset, PartyData

Weighting = Literal["tfidf", "multihot"]


@dataclass(frozen=True)
class TextFit:
    """What was learned from one party's words in the training rows.

    Parameters
    ----------
    words : tuple[str, ...]
        The party's words: the columns of its tensor.
    weighting : Weighting
        ``"tfidf"`` or ``"multihot"``.
    idf : tuple[float, ...] (default: ())
        Inverse document frequency of each word; empty for ``"multihot"``.
    """

    words: tuple[str, ...]
    weighting: Weighting
    idf: tuple[float, ...] = ()

    @property
    def spec(self) -> InputSpec:
        """The shape of what :meth:`apply` returns."""
        return InputSpec(numeric=len(self.words))

    def apply(self, texts: Sequence[str]) -> tuple[Tensor, ...]:
        """Turn texts, old or new, into the party's numbers."""
        from sklearn.feature_extraction.text import CountVectorizer

        vectorizer = CountVectorizer(vocabulary=list(self.words))
        return self.weigh(vectorizer.transform(texts))

    def weigh(self, counts: Any) -> tuple[Tensor, ...]:
        """Turn counts of the party's words into the party's numbers."""
        dense = counts.toarray().astype(np.float32)
        if self.weighting == "multihot":
            return (torch.from_numpy((dense > 0).astype(np.float32)),)
        dense *= np.asarray(self.idf, dtype=np.float32)
        length = np.linalg.norm(dense, axis=1, keepdims=True)
        return (torch.from_numpy(dense / np.where(length == 0, 1, length)),)

    def state_dict(self) -> dict[str, Any]:
        """Return the fit as plain lists and numbers, fit for JSON."""
        return {
            "words": list(self.words),
            "weighting": self.weighting,
            "idf": list(self.idf),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TextFit:
        """Return the fit that :meth:`state_dict` wrote."""
        return cls(tuple(state["words"]), state["weighting"], tuple(state["idf"]))


def vocabulary(
    dataset: Dataset, codes: NDArray[np.int8], max_features: int
) -> tuple[str, ...]:
    """Return the commonest words of the training rows, in alphabetical order."""
    words, _ = _count(dataset, codes.tobytes(), max_features)
    return words


def prepare_text(
    dataset: Dataset,
    codes: NDArray[np.int8],
    words: Sequence[str],
    *,
    weighting: Weighting = "tfidf",
    max_features: int = 1000,
) -> PartyData:
    """Prepare one party's words.

    The weights and the length of a row are those of the party's own words, as if the
    party knew no others.
    """
    if weighting not in ("tfidf", "multihot"):
        raise ConfigError(f"unknown weighting '{weighting}'; known: multihot, tfidf")
    known, counts = _count(dataset, codes.tobytes(), max_features)
    position = {word: index for index, word in enumerate(known)}
    own = counts[:, [position[word] for word in words]]
    idf: tuple[float, ...] = ()
    if weighting == "tfidf":
        train = own[np.flatnonzero(codes == TRAIN)]
        holders = np.asarray((train > 0).sum(axis=0)).ravel()
        idf = tuple((np.log((1 + train.shape[0]) / (1 + holders)) + 1).tolist())
    fit = TextFit(tuple(words), weighting, idf)
    return PartyData(fit.weigh(own), fit.spec, fit.words, fit)


# Kept because every party of a process needs the same counts.
@lru_cache(maxsize=4)
def _count(
    dataset: Dataset, codes: bytes, max_features: int
) -> tuple[tuple[str, ...], Any]:
    """Return the vocabulary and, as a sparse matrix, how often a row has a word."""
    from sklearn.feature_extraction.text import CountVectorizer

    if dataset.text is None:
        raise ConfigError(f"dataset '{dataset.name}' holds no text: {dataset.kind}")
    if max_features < 1:
        raise ConfigError(f"max_features must be at least 1, got {max_features}")
    train = np.flatnonzero(np.frombuffer(codes, dtype=np.int8) == TRAIN)
    vectorizer = CountVectorizer(max_features=max_features)
    vectorizer.fit([dataset.text[row] for row in train])
    words = tuple(str(word) for word in vectorizer.get_feature_names_out())
    return words, vectorizer.transform(dataset.text).tocsr()
