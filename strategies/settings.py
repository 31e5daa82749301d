"""Settings of the strategy that may be written in more than one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flower_vfl.errors import ConfigError
from flower_vfl.transform import GradientTransform

from .defenses import build_defense


def rates_by_party(rate: float | Mapping[str, float] | None) -> dict[str, float]:
    """Return learning rates by party name, ``"*"`` for the others.

    Parameters
    ----------
    rate : float | Mapping[str, float] | None
        One for all, by name, or None for those of the parties' optimizers.
    """
    if rate is None:
        return {}
    rates = dict(rate) if isinstance(rate, Mapping) else {"*": rate}
    for name, value in rates.items():
        if not value > 0.0:
            raise ConfigError(
                f"the learning rate of '{name}' must be positive: {value}"
            )
    return rates


def transform_list(
    given: Sequence[GradientTransform] | GradientTransform | str,
) -> list[GradientTransform]:
    """Return defenses as a list.

    Parameters
    ----------
    given : Sequence[GradientTransform] | GradientTransform | str
        Several, one, or the config string of one; an empty string is none.
    """
    if isinstance(given, str):
        return [build_defense(given)] if given.strip() else []
    if isinstance(given, Sequence):
        return list(given)
    return [given]
