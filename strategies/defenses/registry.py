"""Defenses by name: from a config string or a TOML table, back to a string; where."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.specs import build_from_spec, write_spec, write_value
from flower_vfl.strategies.defenses.marvell.transform import Marvell
from flower_vfl.transform import GradientTransform

from .compose import Compose, NoDefense, PerParty, Scheduled, flat
from .geno import Geno
from .gradient_compression import GradientCompression
from .iso import Iso
from .max_norm import MaxNorm
from .multi_bucket import MultiBucket
from .noisy_gradients import NoisyGradients
from .ppdl import PPDL
from .sgsub import FLSG, SGSub

DEFENSES: dict[str, Callable[..., GradientTransform]] = {
    "none": NoDefense,
    "iso": Iso,
    "max-norm": MaxNorm,
    "marvell": Marvell,
    "gradient-compression": GradientCompression,
    "noisy-gradients": NoisyGradients,
    "multi-bucket": MultiBucket,
    "ppdl": PPDL,
    "sgsub": SGSub,
    "flsg": FLSG,
    "geno": Geno,
}
SHORT_NAMES = {"gc": "gradient-compression", "mg": "multi-bucket"}
SHORT_NAMES["ng"] = "noisy-gradients"
Placement = Literal["strategy", "label"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
DefenseLike = str | GradientTransform | Sequence[GradientTransform]
_PARTY = re.compile(r"\s*([^:=@|]+?)\s*=(.*)", re.DOTALL)
_EPOCH = re.compile(r"@\s*(\d+)\s")


def build_defense(spec: object) -> GradientTransform:
    """Build the defense that a setting names.

    A config string is ``marvell:s=4``, or several in order,
    ``marvell:s=4 | gc:keep=0.5``, or by epochs, ``@1 none @5 marvell``, or by parties,
    ``passive-1=marvell:s=16; *=marvell:s=4``; parties contain epochs, which contain
    transforms.

    Parameters
    ----------
    spec : str | Mapping | Sequence | GradientTransform
        A config string; or a table as TOML reads it: ``{"name": "marvell", "s": 4}``,
        ``{"parties": {"a": ..., "*": ...}}``, ``{"epochs": {"1": ..., "5": ...}}``; or
        a list of any of these; or a transform, which is returned as it is.

    Examples
    --------
    >>> from flower_vfl.strategies import build_defense
    >>> build_defense("marvell:s=16").s
    16.0
    >>> type(build_defense([{"name": "iso", "t": 4}, "gc:keep=0.5"])).__name__
    'Compose'
    """
    if isinstance(spec, str):
        return _from_text(spec)
    if isinstance(spec, Mapping):
        return _from_table(spec)
    if isinstance(spec, Sequence):
        parts = [build_defense(part) for part in spec]
        return parts[0] if len(parts) == 1 else Compose(parts)
    if isinstance(spec, GradientTransform):
        return spec
    kind = type(spec).__name__
    raise ConfigError(f"a defense is a name, a table or a transform, not {kind}")


def _from_text(text: str) -> GradientTransform:
    """Build parties, which contain epochs, which contain transforms in order."""
    if ";" not in text and not _PARTY.match(text):
        return _from_schedule(text)
    parties: dict[str, GradientTransform] = {}
    for part in filter(str.strip, text.split(";")):
        found = _PARTY.match(part)
        if found is None:
            remedy = "write passive-1=marvell:s=16; *=marvell:s=4"
            raise ConfigError(f"'{part.strip()}' does not begin with a party: {remedy}")
        if found[1] in parties:
            raise ConfigError(f"'{text}' names the party '{found[1]}' twice")
        parties[found[1]] = _from_schedule(found[2])
    return PerParty(parties)


def _from_schedule(text: str) -> GradientTransform:
    first, *pieces = _EPOCH.split(text)
    if not pieces:
        return _from_chain(text)
    if first.strip():
        raise ConfigError(f"'{text}' must begin with an epoch, as in '@1 none @5 iso'")
    epochs = {}
    for epoch, part in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
        if epoch in epochs:
            raise ConfigError(f"'{text}' names the epoch {epoch} twice")
        epochs[epoch] = _from_chain(part)
    return Scheduled(epochs)


def _from_chain(text: str) -> GradientTransform:
    parts = [_from_name(part) for part in text.split("|")]
    return parts[0] if len(parts) == 1 else Compose(parts)


def _from_name(text: str) -> GradientTransform:
    name, colon, rest = text.strip().partition(":")
    full = SHORT_NAMES.get(name.strip(), name.strip())
    return build_from_spec("defense", f"{full}{colon}{rest}", DEFENSES)


def _from_table(table: Mapping[str, Any]) -> GradientTransform:
    kinds = [key for key in ("name", "parties", "epochs") if key in table]
    if len(kinds) != 1 or (kinds != ["name"] and len(table) > 1):
        raise ConfigError(
            "the table of a defense has a 'name' with its parameters, or 'parties', or "
            f"'epochs'; this one has {', '.join(map(str, table)) or 'nothing'}"
        )
    inner = table[kinds[0]]
    if kinds == ["name"]:
        name = SHORT_NAMES.get(str(inner), str(inner))
        check_name("defense", name, DEFENSES)
        texts = [f"{k}={write_value(v)}" for k, v in table.items() if k != "name"]
        return _from_name(f"{name}:{','.join(texts)}" if texts else name)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"'{kinds[0]}' of a defense must be a table")
    built = {str(key): build_defense(value) for key, value in inner.items()}
    if kinds == ["parties"]:
        return PerParty(built)
    if not all(key.isdigit() for key in built):
        raise ConfigError(f"the epochs of a defense are numbers, got {list(built)}")
    return Scheduled({int(key): value for key, value in built.items()})


def defense_spec(transform: GradientTransform) -> str:
    """Return the config string from which a node can build the same defense.

    Parameters
    ----------
    transform : GradientTransform
        A combination of this package's defenses.

    Examples
    --------
    >>> from flower_vfl.strategies import Compose, Iso, MaxNorm, defense_spec
    >>> defense_spec(Compose([Iso(t=4.0), MaxNorm()]))
    'iso:t=4.0 | max-norm'
    """
    if isinstance(transform, PerParty):
        parts = {n: p for n, p in transform.parts.items() if n != "*"}
        parts["*"] = transform.parts["*"]
        for party in parts:
            if re.search(r"[:;=@|]", party) or party != party.strip():
                remedy = "use one without spaces around it and without : ; = @ |"
                raise ConfigError(f"party name '{party}' fits no setting; {remedy}")
        return "; ".join(f"{n}={_nested(p, PerParty)}" for n, p in parts.items())
    if isinstance(transform, Scheduled):
        return " ".join(
            f"@{epoch} {_nested(part, PerParty, Scheduled)}"
            for epoch, part in transform.epochs.items()
        )
    if isinstance(transform, Compose):
        if len(transform.parts) == 1:
            return defense_spec(transform.parts["0"])
        parts = transform.parts
        inner = (_nested(part, PerParty, Scheduled) for part in parts.values())
        return " | ".join(inner) or "none"
    for name, kind in DEFENSES.items():
        if type(transform) is kind:
            return write_spec(name, transform, kind)
    raise ConfigError(
        f"{type(transform).__name__} is not one of {', '.join(DEFENSES)}; run it at "
        "the strategy, or pass it to LabelParty(defense=...)"
    )


def _nested(transform: GradientTransform, *outside: type) -> str:
    if isinstance(transform, outside):
        remedy = "nest parties outside of epochs, and epochs outside of chains"
        kind = f"{type(transform).__name__} inside another defense"
        raise ConfigError(f"{kind} has no config string; {remedy}")
    return defense_spec(transform)


@dataclass(frozen=True)
class Defense:
    """What is done to every gradient before it leaves for its party, and where.

    Parameters
    ----------
    what : str | GradientTransform | Sequence[GradientTransform] (default: ())
        A config string such as ``"marvell:s=4"``, a transform, or several, which are
        applied in order.
    at : Literal["strategy", "label"] (default: "strategy")
        Where it runs: at the strategy, which needs a label party that trusts the
        server, or at the label party, before anything leaves it.
    noise_seed : int | None (default: None)
        Seed of the noise, for repeatable simulations: a party that knows it can
        subtract the noise. None draws a secret for every run, and so does a label party
        that does not trust the server.

    Examples
    --------
    >>> from flower_vfl.strategies import Defense, Marvell
    >>> Defense("marvell:s=16", at="label").spec
    'marvell:s=16.0'
    >>> Defense([Marvell(s=4)]).at
    'strategy'
    """

    what: DefenseLike = ()
    at: Placement = "strategy"
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        check_name("placement", self.at, PLACEMENTS)
        if self.noise_seed is not None and self.noise_seed < 0:
            raise ConfigError(f"noise_seed must not be negative, got {self.noise_seed}")
        what = self.what
        if isinstance(what, str):
            what = [build_defense(what)] if what.strip() else []
        elif isinstance(what, GradientTransform):
            what = [what]
        object.__setattr__(self, "what", tuple(flat(what)))

    @property
    def transforms(self) -> tuple[GradientTransform, ...]:
        """The transforms, in the order in which they are applied."""
        return self.what  # type: ignore[return-value]

    @property
    def spec(self) -> str:
        """The config string of the transforms."""
        return defense_spec(Compose(self.transforms))

    @property
    def name(self) -> str:
        """The config string, or the classes of transforms that have none."""
        try:
            return self.spec
        except ConfigError:
            return " | ".join(type(each).__name__ for each in self.transforms)
