"""Which party gets which columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, pairwise

import numpy as np

from flower_vfl.errors import ConfigError

_FORMS = (
    "'even', 'fractions=0.3,0.7', 'widths=10,20,27', 'dirichlet=0.5' or "
    "'columns=age+income|height'"
)


@dataclass(frozen=True)
class Split:
    """How columns are divided among the passive parties; one field is filled.

    Nothing filled means an even division.

    Parameters
    ----------
    fractions : tuple[float, ...] (default: ())
        Share of the columns of each passive party.
    widths : tuple[int, ...] (default: ())
        Number of columns of each passive party.
    columns : tuple[tuple[str, ...], ...] (default: ())
        Names of the columns of each passive party.
    label : tuple[str, ...] (default: ())
        Names of the columns of the label party, beside ``columns``.
    dirichlet : float | None (default: None)
        Concentration of a Dirichlet distribution that the shares are drawn from; the
        smaller, the more uneven. Every passive party gets at least one column.
    seed : int (default: 0)
        What they are drawn with: all parties must come to the same division.
    """

    fractions: tuple[float, ...] = ()
    widths: tuple[int, ...] = ()
    columns: tuple[tuple[str, ...], ...] = ()
    label: tuple[str, ...] = ()
    dirichlet: float | None = None
    seed: int = 0

    @property
    def parties(self) -> int | None:
        """Number of passive parties; None if any number will do."""
        return len(self.fractions or self.widths or self.columns) or None


SplitLike = Split | str | Sequence[int] | Sequence[float] | Mapping[int, Sequence[str]]
LabelShare = float | str | Sequence[str]


def parse_split(text: str) -> Split:
    """Return the division that a string of a config or command line describes.

    Parameters
    ----------
    text : str
        ``"even"``; ``"fractions=0.3,0.7"``; ``"widths=10,20,27"``;
        ``"dirichlet=0.5"`` or, with a seed, ``"dirichlet=0.5,3"``; or
        ``"columns=age+income|height"``, where ``|`` stands between parties and ``+``
        between their columns. Each entry is a passive party.
    """
    form, _, rest = text.strip().partition("=")
    entries = [entry.strip() for entry in rest.split("|" if form == "columns" else ",")]
    try:
        if text.strip() == "even":
            return Split()
        if form == "fractions":
            return as_split([float(entry) for entry in entries])
        if form == "widths":
            return as_split([int(entry) for entry in entries])
        if form == "dirichlet":
            seed = int(entries[1]) if entries[1:] else 0
            return as_split(Split(dirichlet=float(entries[0]), seed=seed))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"split '{text}': {error}; write {_FORMS}") from error
    if form == "columns" and rest:
        names = [_names(entry) for entry in entries]
        return as_split(dict(enumerate(names, start=1)))
    raise ConfigError(f"unknown split '{text}'; write {_FORMS}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split("+") if name.strip()]


def as_split(value: SplitLike) -> Split:
    """Return a division in its checked form.

    Parameters
    ----------
    value : SplitLike
        A :class:`Split`; a string for :func:`parse_split`; fractions (floats) or
        widths (integers) of the passive parties; or the column names of each party,
        1 being the first passive party and 0 the label party.
    """
    if isinstance(value, str):
        return parse_split(value)
    if isinstance(value, Mapping):
        split = _by_names(value)
    elif isinstance(value, Split):
        split = value
    elif all(isinstance(x, int | np.integer) for x in value):
        split = Split(widths=tuple(int(x) for x in value))
    else:
        split = Split(fractions=tuple(float(x) for x in value))
    _check(split)
    return split


def _by_names(value: Mapping[int, Sequence[str]]) -> Split:
    passive = sorted(party for party in value if party != 0)
    if passive != list(range(1, len(passive) + 1)) or not passive:
        raise ConfigError(
            "columns are given for the parties 1, 2, ... and, if it has any, for the "
            f"label party 0; got {sorted(value)}"
        )
    columns = tuple(tuple(value[party]) for party in passive)
    return Split(columns=columns, label=tuple(value.get(0, ())))


def _check(split: Split) -> None:
    alpha = split.dirichlet
    if alpha is not None and (not 0 < alpha < float("inf") or split.seed < 0):
        raise ConfigError(
            "a Dirichlet division has a concentration above 0 and a seed from 0, got "
            f"{alpha:g} and {split.seed}"
        )
    if any(not 0 < share <= 1 for share in split.fractions):
        raise ConfigError(f"every fraction must be in (0, 1], got {split.fractions}")
    total = sum(split.fractions)
    if split.fractions and not abs(total - 1) < 1e-6:
        raise ConfigError(
            f"the fractions of the passive parties must add up to 1, got {total:g}"
        )
    if any(width < 1 for width in split.widths):
        raise ConfigError(
            f"every passive party needs at least one column, got widths {split.widths}"
        )
    for number, names in enumerate(split.columns, start=1):
        if not names:
            raise ConfigError(f"passive party {number} is given no columns")
    seen: set[str] = set()
    for name in chain(split.label, *split.columns):
        if name in seen:
            raise ConfigError(f"column '{name}' is given twice")
        seen.add(name)


def divide_columns(
    columns: Sequence[str],
    parties: int,
    split: SplitLike = "even",
    label_share: LabelShare = 0.0,
) -> list[tuple[str, ...]]:
    """Return the columns of the label party and of each passive party.

    Parameters
    ----------
    columns : Sequence[str]
        All columns.
    parties : int
        Number of passive parties.
    split : SplitLike (default: "even")
        How the columns that the label party does not keep are divided: evenly (the
        first parties get one more if it does not come out even), by fractions, by
        widths or by names. Names may leave columns out; nobody gets those.
    label_share : LabelShare (default: 0.0)
        What the label party keeps: a fraction of the columns (the first ones), or
        names (a sequence, or ``"age+income"``).

    Returns
    -------
    list[tuple[str, ...]]
        The label party's columns, perhaps none, and then those of each passive party.
    """
    plan = as_split(split)
    if parties < 1:
        raise ConfigError(f"there must be at least one passive party, got {parties}")
    if plan.parties not in (None, parties):
        raise ConfigError(
            f"the split describes {plan.parties} passive parties, but there are "
            f"{parties}"
        )
    label = _label_columns(columns, plan, label_share)
    kept = set(label)
    rest = [column for column in columns if column not in kept]
    if plan.columns:
        _check_known(list(chain(*plan.columns)), columns)
        taken = kept & set(chain(*plan.columns))
        if taken:
            raise ConfigError(
                f"columns {sorted(taken)} are given to a passive party and kept by "
                "the label party"
            )
        return [label, *plan.columns]
    bounds = _bounds(len(rest), parties, plan)
    return [label, *(tuple(rest[a:b]) for a, b in pairwise(bounds))]


def _bounds(columns: int, parties: int, plan: Split) -> list[int]:
    """Return where each passive party's columns begin and end."""
    if parties > columns:
        raise ConfigError(
            f"{parties} passive parties cannot share {columns} columns; take fewer "
            "parties or a smaller label_share"
        )
    if plan.widths:
        if sum(plan.widths) != columns:
            raise ConfigError(
                f"the widths {list(plan.widths)} add up to {sum(plan.widths)}, but "
                f"{columns} columns are to be divided among the passive parties"
            )
        return [0, *np.cumsum(plan.widths).tolist()]
    if plan.fractions:
        ends = np.rint(np.cumsum(plan.fractions) * columns).astype(int).tolist()
        bounds = [0, *ends[:-1], columns]
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            if stop <= start:
                raise ConfigError(
                    f"fraction {plan.fractions[number - 1]:g} of {columns} columns "
                    f"leaves passive party {number} without a column"
                )
        return bounds
    if plan.dirichlet is not None:
        widths = dirichlet_widths(columns, parties, plan.dirichlet, plan.seed)
        return [0, *np.cumsum(widths).tolist()]
    size, extra = divmod(columns, parties)
    return [number * size + min(number, extra) for number in range(parties + 1)]


def dirichlet_widths(
    columns: int, parties: int, concentration: float, seed: int = 0
) -> list[int]:
    """Return how many columns each party gets if their shares are drawn at random.

    One column each, and of the rest a share that is drawn from a Dirichlet
    distribution, rounded by the largest remainders.
    """
    stream = np.random.default_rng(seed)
    exact = stream.dirichlet([concentration] * parties) * (columns - parties)
    whole = np.floor(exact).astype(int)
    left = columns - parties - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return [int(width) for width in whole + 1]


def _label_columns(
    columns: Sequence[str], plan: Split, share: LabelShare
) -> tuple[str, ...]:
    """Return what the label party keeps."""
    if isinstance(share, str):
        try:
            share = float(share)
        except ValueError:
            share = _names(str(share))
    names = plan.label
    if isinstance(share, Sequence):
        if names and share:
            raise ConfigError("the label party's columns are given twice")
        names = names or tuple(share)
        _check_known(names, columns)
        return names
    if not 0 <= share < 1:
        raise ConfigError(f"label_share must be in [0, 1), got {share:g}")
    if share == 0:
        _check_known(names, columns)
        return names
    if plan.columns:
        raise ConfigError(
            "with columns by name, give the label party's columns by name as well, "
            f"instead of label_share={share:g}"
        )
    width = round(share * len(columns))
    if width == 0:
        raise ConfigError(
            f"label_share={share:g} of {len(columns)} columns is less than one column"
        )
    return tuple(columns[:width])


def _check_known(names: Sequence[str], columns: Sequence[str]) -> None:
    known = set(columns)
    for name in names:
        if name not in known:
            near = get_close_matches(name, columns, n=3) or list(columns[:10])
            more = "" if len(near) < 10 else ", ..."
            raise ConfigError(
                f"there is no column '{name}'; near names: {', '.join(near)}{more}"
            )
