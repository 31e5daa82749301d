"""A dataset divided by columns among the label party and the passive parties."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError, require
from flower_vfl.parties.schedule import TRAIN

from .prepare import prepare_table
from .types import Dataset, InputSpec, PartyData

_VOCABULARY = 1000  # the commonest words of the training rows
_WORD_SEED = 0
_FORMS = "'even', 'fractions=0.3,0.7', 'widths=10,20,27', 'dirichlet=0.5' or "
_FORMS += "'columns=age+income|height'"


def party_columns(
    dataset: Dataset,
    codes: NDArray[np.int8],
    parties: int,
    split: str = "even",
    label_share: float | str = 0.0,
) -> list[tuple[str, ...]]:
    """Return the columns of the label party (first) and of each passive party.

    The columns of an image are its pixel columns ``x0``, ``x1``, ..., those of a text
    its words, which are shuffled, so that every party gets common and rare ones.
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
        text = f"dataset '{dataset.name}' has {len(dataset)} rows but the split has"
        raise ConfigError(f"{text} {len(codes)}")
    if not columns:
        return PartyData((), None, ())
    if dataset.table is not None:
        return _columns(dataset, codes.tobytes(), tuple(columns))
    if dataset.pictures is not None:
        return _strip(dataset, columns)
    return _tfidf(dataset, codes, columns)


@lru_cache(maxsize=16)  # the runs of a study prepare the same columns
def _columns(dataset: Dataset, codes: bytes, columns: tuple[str, ...]) -> PartyData:
    """Prepare columns of a table."""
    assert dataset.table is not None
    own, split = dataset.table[list(columns)], np.frombuffer(codes, dtype=np.int8)
    return prepare_table(own, split, dataset.log_columns)


def _strip(dataset: Dataset, columns: Sequence[str]) -> PartyData:
    """Cut neighbouring pixel columns out of the images."""
    positions = [int(column.removeprefix("x")) for column in columns]
    start, stop = positions[0], positions[-1] + 1
    if positions != list(range(start, stop)):
        text = "a party's part of an image must be a strip of neighbouring columns"
        raise ConfigError(f"{text}, got {list(columns)}")
    # A copy, because torch cannot hold the shared read-only array.
    strip = dataset.images[..., start:stop].copy()
    channels, height, width = strip.shape[1:]
    spec = InputSpec(image=(channels, height, width))
    return PartyData((torch.from_numpy(strip),), spec, tuple(columns))


def _tfidf(
    dataset: Dataset, codes: NDArray[np.int8], words: Sequence[str]
) -> PartyData:
    """Return the TF-IDF values of one party's words, as if it knew no others."""
    from sklearn.feature_extraction.text import TfidfTransformer

    known, counts = _word_counts(dataset, codes.tobytes())
    position = {word: index for index, word in enumerate(known)}
    own = counts[:, [position[word] for word in words]]
    weights = TfidfTransformer().fit(own[codes == TRAIN])
    inputs = torch.from_numpy(weights.transform(own).toarray().astype(np.float32))
    return PartyData((inputs,), InputSpec(numeric=len(words)), tuple(words))


@lru_cache(maxsize=4)  # every party of a process needs the same counts
def _word_counts(dataset: Dataset, codes: bytes) -> tuple[tuple[str, ...], Any]:
    """Return the commonest words of the training rows, and each row's word counts."""
    from sklearn.feature_extraction.text import CountVectorizer

    assert dataset.text is not None  # it is no table and has no pictures
    train = np.flatnonzero(np.frombuffer(codes, dtype=np.int8) == TRAIN)
    vectorizer = CountVectorizer(max_features=_VOCABULARY)
    vectorizer.fit([dataset.text[row] for row in train])
    words = tuple(str(word) for word in vectorizer.get_feature_names_out())
    return words, vectorizer.transform(dataset.text).tocsr()


@dataclass(frozen=True)
class Split:
    """A parsed split: at most one field is set, none for an even split."""

    fractions: tuple[float, ...] = ()
    widths: tuple[int, ...] = ()
    columns: tuple[tuple[str, ...], ...] = ()
    dirichlet: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        alpha = self.dirichlet
        if alpha is not None and (not 0 < alpha < float("inf") or self.seed < 0):
            text = "a Dirichlet split needs a concentration above 0 and a seed of at"
            raise ConfigError(f"{text} least 0, got {alpha:g} and {self.seed}")
        shares, total = self.fractions, sum(self.fractions)
        positive = all(0 < share <= 1 for share in shares)
        require(positive, "every fraction", "in (0, 1]", shares)
        if shares and not abs(total - 1) < 1e-6:
            raise ConfigError(f"all fractions must add up to 1, got {total:g}")
        wide = all(width >= 1 for width in self.widths)
        require(wide, "every width", "at least one column", self.widths)
        for number, names in enumerate(self.columns, start=1):
            if not names:
                raise ConfigError(f"passive party {number} is given no columns")
        for name, times in Counter(chain(*self.columns)).items():
            if times > 1:
                raise ConfigError(f"column '{name}' is given twice")

    @property
    def parties(self) -> int | None:
        """Number of passive parties; None if any number will do."""
        return len(self.fractions or self.widths or self.columns) or None


def parse_split(text: str) -> Split:
    """Return the split that a setting describes, such as ``"fractions=0.3,0.7"``."""
    form, _, rest = text.strip().partition("=")
    entries = [entry.strip() for entry in rest.split("|" if form == "columns" else ",")]
    try:
        if text.strip() == "even":
            return Split()
        if form == "fractions":
            return Split(fractions=tuple(map(float, entries)))
        if form == "widths":
            return Split(widths=tuple(map(int, entries)))
        if form == "dirichlet":
            seed = int(entries[1]) if entries[1:] else 0
            return Split(dirichlet=float(entries[0]), seed=seed)
        if form == "columns" and rest:
            return Split(columns=tuple(map(_names, entries)))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"split '{text}': {error}; write {_FORMS}") from error
    raise ConfigError(f"unknown split '{text}'; write {_FORMS}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split("+") if name.strip())


def divide_columns(
    columns: Sequence[str],
    parties: int,
    split: str = "even",
    label_share: float | str = 0.0,
) -> list[tuple[str, ...]]:
    """Return the columns of the label party, then those of each passive party."""
    plan = parse_split(split)
    if parties < 1:
        raise ConfigError(f"there must be at least one passive party, got {parties}")
    if plan.parties not in (None, parties):
        text = "the split is for another number of passive parties"
        raise ConfigError(f"{text}: {plan.parties}, not {parties}")
    copied = label_share == "*"  # then the passive parties have all columns, too
    label = () if copied else _label_columns(columns, label_share, bool(plan.columns))
    rest = [column for column in columns if column not in set(label)]
    label = tuple(columns) if copied else label
    if plan.columns:
        named = set(chain(*plan.columns))
        _check_known(sorted(named), columns)
        if (shared := sorted(named & set(label))) and not copied:
            text = "are given to a passive party and kept by the label party"
            raise ConfigError(f"columns {shared} {text}")
        return [label, *plan.columns]
    bounds = _bounds(len(rest), parties, plan)
    return [label, *(tuple(rest[a:b]) for a, b in pairwise(bounds))]


def _bounds(columns: int, parties: int, plan: Split) -> list[int]:
    """Return where each passive party's columns begin and end."""
    if parties > columns:
        text = f"{columns} columns are too few for the number of passive parties"
        remedy = "use fewer parties or a smaller label_share"
        raise ConfigError(f"{text}, {parties}; {remedy}")
    size, extra = divmod(columns, parties)
    widths = plan.widths or [size + (number < extra) for number in range(parties)]
    if sum(widths) != columns:
        text = f"the widths {list(widths)} add up to {sum(widths)}"
        raise ConfigError(f"{text}, but {columns} columns are to be divided")
    if plan.fractions:
        ends = np.rint(np.cumsum(plan.fractions) * columns).astype(int).tolist()
        bounds = [0, *ends[:-1], columns]
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            if stop <= start:
                share = f"fraction {plan.fractions[number - 1]:g} of {columns} columns"
                left = f"leaves passive party {number} without a column"
                raise ConfigError(f"{share} {left}")
        return bounds
    if plan.dirichlet is not None:
        widths = dirichlet_widths(columns, parties, plan.dirichlet, plan.seed)
    return [0, *np.cumsum(widths).tolist()]


def dirichlet_widths(
    columns: int, parties: int, concentration: float, seed: int = 0
) -> list[int]:
    """Return widths: a column each, then Dirichlet shares by largest remainders."""
    stream = np.random.default_rng(seed)
    exact = stream.dirichlet([concentration] * parties) * (columns - parties)
    whole = np.floor(exact).astype(int)
    left = columns - parties - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return [int(width) for width in whole + 1]


def _label_columns(
    columns: Sequence[str], share: float | str, by_name: bool
) -> tuple[str, ...]:
    """Return the columns that the label party keeps: named ones or the first ones."""
    try:
        fraction = float(share)
    except ValueError:
        names = _names(str(share))
        _check_known(names, columns)
        return names
    require(0 <= fraction < 1, "label_share", "in [0, 1)", f"{fraction:g}")
    if fraction and by_name:
        text = "with columns by name, give the label party's columns by name as well"
        raise ConfigError(f"{text}, instead of label_share={fraction:g}")
    width = round(fraction * len(columns))
    if fraction and not width:
        text = f"label_share={fraction:g} of {len(columns)} columns"
        raise ConfigError(f"{text} is less than one column")
    return tuple(columns[:width])


def _check_known(names: Sequence[str], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            near = get_close_matches(name, columns, n=3) or list(columns[:10])
            known = ", ".join(near) + ("" if len(near) < 10 else ", ...")
            raise ConfigError(f"there is no column '{name}'; near names: {known}")
