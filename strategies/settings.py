"""Settings of the strategy that may be written in more than one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO
from typing import TYPE_CHECKING

from flwr.supercore import log

from flower_vfl.errors import ConfigError
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.strategies.defenses.compose import Compose, flat
from flower_vfl.strategies.defenses.registry import build_defense, defense_spec
from flower_vfl.transform import GradientTransform

if TYPE_CHECKING:
    from .vertical import VerticalStrategy


def not_negative(**numbers: int) -> None:
    """Refuse negative numbers."""
    for name, number in numbers.items():
        if number < 0:
            raise ConfigError(f"{name} must not be negative, got {number}")


def not_used(**given: object) -> None:
    """Refuse what Flower's strategies take and vertical training has no use for."""
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"{name} is not used in vertical training: parties keep their own "
                "models, and settings are arguments of VerticalStrategy"
            )


def rates_by_party(rate: float | Mapping[str, float] | None) -> dict[str, float]:
    """Return learning rates by party name, ``"*"`` for the others."""
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
    """Return defenses as a list."""
    if isinstance(given, str):
        return flat([build_defense(given)]) if given.strip() else []
    return flat([given] if isinstance(given, GradientTransform) else given)


def log_settings(strategy: VerticalStrategy) -> None:
    """Log the settings of a strategy."""
    fraction = f"test {strategy.test_fraction:g}, valid {strategy.valid_fraction:g}"
    names = ", ".join(type(t).__name__ for t in strategy.transforms)
    defenses = f"{names} (at the {strategy.placement})" if names else "none"
    log(INFO, "\t├──> batch size: %s, seed: %d", strategy.batch_size, strategy.seed)
    log(INFO, "\t├──> aggregation: %s", strategy.aggregation or "the label party's")
    log(INFO, "\t├──> alignment: %s", strategy.alignment.method)
    log(INFO, "\t├──> held out (unless the data says): %s", fraction)
    log(INFO, "\t└──> defenses: %s", defenses)


def make_config(strategy: VerticalStrategy) -> TrainingConfig:
    """Return what a strategy has the parties agree on, still without the parties."""
    leakage = strategy.leakage
    terms = TrainingConfig(
        seed=strategy.seed,
        batch_size=strategy.batch_size,
        evaluation_rows=strategy.evaluation_rows,
        test_fraction=strategy.test_fraction,
        valid_fraction=strategy.valid_fraction,
        aggregation=strategy.aggregation or "",
        leakage="" if leakage is None else leakage.to_text(),
    )
    return with_defense(
        terms, strategy.transforms, strategy.placement, strategy.noise_seed
    )


def with_defense(
    terms: TrainingConfig,
    transforms: Sequence[GradientTransform],
    placement: str,
    noise_seed: int | None,
) -> TrainingConfig:
    """Return terms that say what the label party must know about defenses."""
    if not transforms:
        return terms
    if placement != "label":
        return replace(terms, defended=placement)
    defense = defense_spec(Compose(transforms))
    given = "" if noise_seed is None else f"{noise_seed:x}"
    return replace(terms, defended=placement, defense=defense, noise_seed=given)
