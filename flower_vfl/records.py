"""What a run measured, as records with fields."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("metric", "party", "attack", "layer", "step", "value")


@dataclass(frozen=True, slots=True)
class Measurement:
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


def to_columns(records: Iterable[Measurement]) -> dict[str, list[Any]]:
    """Return records as one list per field, for messages, checkpoints and JSON."""
    rows = list(records)
    return {column: [getattr(row, column) for row in rows] for column in COLUMNS}


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Measurement]:
    """Return the records that :func:`to_columns` took apart."""
    fields = [columns[column] for column in COLUMNS]
    return [
        Measurement(metric, float(value), int(step), party, attack, layer)
        for metric, party, attack, layer, step, value in zip(*fields, strict=True)
    ]
