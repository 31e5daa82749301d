"""A defense as an argument of the strategy: what is done to gradients, and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.transform import GradientTransform

from .compose import Compose, flat
from .registry import build_defense, defense_spec

Placement = Literal["strategy", "label"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
DefenseLike = str | GradientTransform | Sequence[GradientTransform]


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
        Seed of the noise. None draws a secret for every run. A number makes simulations
        repeatable: a party that knows it can subtract the noise. A label party that
        does not trust the server ignores it.

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
        """Refuse unknown names, and build what a config string names."""
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
