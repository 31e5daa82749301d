"""What a run measured, as records with fields."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple, Self

Kind = tuple[str, str, str, str]  # metric, party, attack, layer
_ROW = struct.Struct("=Iqd")  # number of a kind, step, value
_IN_MEMORY = 1 << 20  # bytes of records before a temporary file takes them
COLUMNS = ("metric", "party", "attack", "layer", "step", "value")
_FIELDS = attrgetter(*COLUMNS)


class Measurement(NamedTuple):
    """One measured number.

    Parameters
    ----------
    metric : str
        What was measured, e.g. ``"leak"``, ``"leak_flipped"`` or ``"auc_bound"``.
    value : float
        The number.
    step : int (default: 0)
        The training step that it belongs to.
    party : str (default: "")
        The passive party that it is about; members of a coalition are joined by ``+``.
    attack : str (default: "")
        The attack that found it.
    layer : str (default: "")
        The layer that was attacked; empty for the cut layer.

    Examples
    --------
    >>> Measurement("leak", 0.75, step=3, party="passive-1", attack="norm").name
    'leak_norm/passive-1'
    """

    metric: str
    value: float
    step: int = 0
    party: str = ""
    attack: str = ""
    layer: str = ""

    @property
    def name(self) -> str:
        """A name for people and trackers; code reads the fields instead."""
        attack = f"_{self.attack}" if self.attack else ""
        layer = f"@{self.layer}" if self.layer else ""
        party = f"/{self.party}" if self.party else ""
        return f"{self.metric}{attack}{layer}{party}"


class Records:
    """Many measurements in order, kept in a file: a long run makes millions."""

    def __init__(self, records: Iterable[Measurement] = ()) -> None:
        self._kinds: dict[Kind, int] = {}
        self._file = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        self += records

    def __iadd__(self, records: Iterable[Measurement]) -> Self:
        kinds, rows = self._kinds, []
        for each in records:
            kind = each.metric, each.party, each.attack, each.layer
            number = kinds.setdefault(kind, len(kinds))
            rows.append(_ROW.pack(number, each.step, each.value))
        self._file.write(b"".join(rows))
        return self

    def __len__(self) -> int:
        return self._file.tell() // _ROW.size

    def __iter__(self) -> Iterator[Measurement]:
        for (metric, *where), step, value in self.rows(0):
            yield Measurement(metric, value, step, *where)

    def rows(self, first: int) -> Iterator[tuple[Kind, int, float]]:
        """Return kind, step and value of each record without the first ones."""
        kinds = list(self._kinds)
        self._file.seek(first * _ROW.size)
        for number, step, value in _ROW.iter_unpack(self._file.read()):
            yield kinds[number], step, value


def to_columns(records: Iterable[Measurement]) -> dict[str, list[Any]]:
    """Return records as one list per field, for messages, checkpoints and JSON."""
    columns = list(zip(*map(_FIELDS, records), strict=True)) or [()] * len(COLUMNS)
    return dict(zip(COLUMNS, map(list, columns), strict=True))


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Measurement]:
    """Return the records that :func:`to_columns` took apart."""
    metric, *where, steps, values = (columns[column] for column in COLUMNS)
    numbers = list(map(float, values)), list(map(int, steps))
    return list(map(Measurement._make, zip(metric, *numbers, *where, strict=True)))
