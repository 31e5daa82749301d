"""What parties say about themselves, and what they are told about a run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Self, cast

from flower_vfl.errors import ConfigError
from flower_vfl.metrics import MAIN_METRIC

Role = Literal["passive", "label"]
Shape = tuple[int, ...]
Value = int | float | str | bytes | bool | list[int] | list[str] | list[bytes]
SAME_VERSION = "do all parties run the same version of flower-vfl?"


@dataclass(frozen=True)
class Greeting:
    """What the hello of a run says about the first weights of the parties."""

    seed: int  # that they are drawn from
    defended: bool  # those of the label party come from its secret
    repeatable: bool  # also they come from the seed, in a simulation

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the entries of a message, or of a saved state."""
        return cls(**_entries(cls, record))


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a run that the strategy sends to a party."""

    seed: int
    batch_size: int
    evaluation_rows: int = 8192
    test_fraction: float = 0.2
    valid_fraction: float = 0.0
    # Shapes of one row of the passive parties' embeddings, in the order of joining.
    parties: Mapping[str, Shape] = field(default_factory=dict)
    aggregation: str = ""
    learning_rate: float = 0.0
    defended: str = ""  # where: "strategy", "label", or nowhere
    defense: str = ""  # this and the next two are for the label party only
    leakage: str = ""
    noise_seed: str = ""  # hexadecimal
    sealed: bool = False
    pipeline: int = 0  # batches that a passive party embeds ahead of its gradients
    compress_embeddings: str = ""
    compress_gradients: str = ""
    local_steps: int = 1  # this and the next two are the fields of `LocalUpdates`
    local_cache: int = 5
    local_threshold: float = 0.5

    @cached_property
    def under_way(self) -> int:
        """Requests to a party that may have no reply yet, which it answers again.

        At the start of an epoch: the last k gradients and an evaluation of two splits
        of the one before, and the first k + 1 batches.
        """
        return 2 * self.pipeline + 3 if self.pipeline else 1

    def common(self) -> Self:
        """Return the settings that all parties are told alike."""
        common = replace(self, defended="", defense="", leakage="", noise_seed="")
        return replace(common, learning_rate=0.0)

    def to_record(self) -> dict[str, Value]:
        """Return the settings as entries of a ConfigRecord."""
        entries: dict[str, Any] = {**asdict(self), "parties": list(self.parties)}
        names = "test_fraction", "valid_fraction", "learning_rate", "local_threshold"
        entries |= {name: float(entries[name]) for name in names}
        return {**entries, "shapes": [*map(_shape_text, self.parties.values())]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the settings that :meth:`to_record` wrote."""
        given = _entries(cls, record)
        shapes = [_read_shape(text) for text in record["shapes"]]
        given["parties"] = dict(zip(record["parties"], shapes, strict=True))
        return cls(**given)


@dataclass(frozen=True)
class PartyDescription:
    """What a party says about itself before a run; the digests are keyed."""

    name: str
    role: Role
    rows: int
    shape: Shape  # of one row of its embedding
    task: str = ""
    ids_digest: str = ""
    split_digest: str = ""
    aligned: str = ""  # digest of the alignment that it keeps
    privacy: str = ""  # what protects the labels
    losses: str = ""  # for such labels, among which a strategy may choose

    def to_record(self) -> dict[str, Value]:
        """Return the description as entries of a ConfigRecord."""
        return {**asdict(self), "shape": _shape_text(self.shape)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the description that :meth:`to_record` wrote."""
        given = _entries(cls, record)
        for name, value in given.items():
            if type(value) is not (int if name == "rows" else str):
                raise ConfigError(f"message entry '{name}' is of the wrong type")
        role, task = given["role"], given["task"]
        known = {"label": [*MAIN_METRIC], "passive": [""]}
        if task not in known.get(role, ()):
            raise ConfigError(f"no party has the role '{role}' and the task '{task}'")
        given["shape"] = _read_shape(given["shape"])
        return cls(**given)


def _entries(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that are fields of a class."""
    names = [each.name for each in fields(kind)]
    if missing := [name for name in names if name not in record]:
        raise ConfigError(f"the message has no '{missing[0]}'; {SAME_VERSION}")
    return {name: record[name] for name in names}


def _shape_text(shape: Shape) -> str:
    return "x".join(str(size) for size in shape)


def _read_shape(text: object) -> Shape:
    sizes = cast(str, text).split("x") if text else []
    if not all(size.isdecimal() and len(size) < 19 for size in sizes):  # as in torch
        raise ConfigError(f"'{text}' is not the shape of an embedding")
    return tuple(int(size) for size in sizes)
