"""Settings of the strategy that may be written in more than one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flower_vfl.errors import ConfigError
from flower_vfl.terms import Terms
from flower_vfl.transform import GradientTransform

from .compose import Compose, flat
from .defenses import build_defense, defense_spec


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
        return flat([build_defense(given)]) if given.strip() else []
    return flat([given] if isinstance(given, GradientTransform) else given)


def with_defense(
    terms: Terms,
    transforms: Sequence[GradientTransform],
    placement: str,
    noise_seed: int | None,
) -> Terms:
    """Return terms that say what the label party must know about defenses.

    Parameters
    ----------
    terms : Terms
        All other terms.
    transforms : Sequence[GradientTransform]
        The defenses.
    placement : str
        Where they run.
    noise_seed : int | None
        What their noise is drawn from, if it is not secret.
    """
    if not transforms:
        return terms
    if placement != "label":
        return replace(terms, defended=placement)
    defense = defense_spec(Compose(transforms))
    given = "" if noise_seed is None else f"{noise_seed:x}"
    return replace(terms, defended=placement, defense=defense, noise_seed=given)
