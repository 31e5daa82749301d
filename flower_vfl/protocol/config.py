"""What parties say about themselves, and what they are told about a run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, cast

from flower_vfl.errors import ConfigError
from flower_vfl.metrics import MAIN_METRIC

Role = Literal["passive", "label"]
Shape = tuple[int, ...]
Value = int | float | str | bytes | bool | list[int] | list[str] | list[bytes]
_PARTIES, _SHAPES = "parties", "shapes"


@dataclass(frozen=True)
class Greeting:
    """What the hello of a run says about the first weights of the parties.

    They are drawn from `seed`. Those of a label party that protects labels, in a run
    that is `defended` or by itself, come from its secret, unless a simulation is to be
    `repeatable`.
    """

    seed: int
    defended: bool
    repeatable: bool

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the entries of a message, or of a saved state."""
        return cls(**_entries(cls, record))


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a run that the strategy sends to a party.

    `parties` gives the shape of one row of each passive party's embedding, in the order
    in which embeddings are joined. `defended` says where gradients are transformed:
    ``"strategy"``, ``"label"``, or nowhere if empty. `defense`, `leakage` and
    `noise_seed` (hexadecimal) are for the label party only. `sealed` says whether
    embeddings and gradients travel encrypted (`flower_vfl.protocol.sealing`), and
    `compress_embeddings` and `compress_gradients` in which codecs (`codecs`).
    `pipeline` is how many batches a passive party embeds ahead of its gradients. The
    last three are the fields of `LocalUpdates`.
    """

    seed: int
    batch_size: int
    evaluation_rows: int = 8192
    test_fraction: float = 0.2
    valid_fraction: float = 0.0
    parties: Mapping[str, Shape] = field(default_factory=dict)
    aggregation: str = ""
    learning_rate: float = 0.0
    defended: str = ""
    defense: str = ""
    leakage: str = ""
    noise_seed: str = ""
    sealed: bool = False
    pipeline: int = 0
    compress_embeddings: str = ""
    compress_gradients: str = ""
    local_steps: int = 1
    local_cache: int = 5
    local_threshold: float = 0.5

    def common(self) -> Self:
        """Return the settings that all parties are told alike."""
        common = replace(self, defended="", defense="", leakage="", noise_seed="")
        return replace(common, learning_rate=0.0)

    def to_record(self) -> dict[str, Value]:
        """Return the settings as entries of a ConfigRecord."""
        entries: dict[str, Any] = {**asdict(self), _PARTIES: list(self.parties)}
        names = "test_fraction", "valid_fraction", "learning_rate", "local_threshold"
        for name in names:
            entries[name] = float(entries[name])
        shapes = [_shape_text(shape) for shape in self.parties.values()]
        return {**entries, _SHAPES: shapes}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the settings that :meth:`to_record` wrote."""
        given = _entries(cls, record)
        shapes = [_read_shape(text) for text in record[_SHAPES]]
        given[_PARTIES] = dict(zip(record[_PARTIES], shapes, strict=True))
        return cls(**given)


@dataclass(frozen=True)
class PartyDescription:
    """What a party says about itself before a run.

    `shape` is that of one row of its embedding. The digests are keyed: they show
    whether two parties have the same ids or the same split, and nothing else. `aligned`
    is the digest of the alignment that it keeps. A label party says what its labels are
    protected by, and among which losses for them a strategy may choose.
    """

    name: str
    role: Role
    rows: int
    shape: Shape
    task: str = ""
    ids_digest: str = ""
    split_digest: str = ""
    aligned: str = ""
    privacy: str = ""
    losses: str = ""

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
        raise ConfigError(
            f"the message has no '{missing[0]}'; do all parties run the same "
            "version of flower-vfl?"
        )
    return {name: record[name] for name in names}


def _shape_text(shape: Shape) -> str:
    return "x".join(str(size) for size in shape)


def _read_shape(text: object) -> Shape:
    sizes = cast(str, text).split("x") if text else []
    if not all(size.isdecimal() for size in sizes):
        raise ConfigError(f"'{text}' is not the shape of an embedding")
    return tuple(int(size) for size in sizes)
