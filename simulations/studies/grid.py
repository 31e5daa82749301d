"""The grid of a sweep: every combination of the values that are to be tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.simulations.attacks import split_attacks
from flower_vfl.simulations.config import RunConfig

from .methods import SPECS, Method, full_name, known_methods, setting_name
from .study import Trial

Values = Mapping[str, Sequence[str]]


def parse_values(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of every name that is varied."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, rest = (part.strip() for part in text.partition("="))
        cut = rest.split(";") if ";" in rest else split_attacks(rest)
        values = [value.strip() for value in cut if value.strip()]
        if not (name and equals and values):
            raise ConfigError(f"'{text}' is not name=value,value, as in seed=0,1,2")
        _check_name(name)
        if name in found:
            raise ConfigError(f"'{name}' is set twice; give all its values at once")
        found[name] = list(dict.fromkeys(values))
    return found


def _check_name(name: str) -> None:
    where, dot, parameter = name.partition(".")
    if not dot:
        setting_name(name)
        return
    known = [*SPECS, *known_methods()]
    if full_name(where) not in known and where.replace("-", "_") not in known:
        raise unknown_name("method", where, known)
    if not parameter.isidentifier():
        raise ConfigError(f"'{name}' does not name a parameter, as in marvell.s")


def sweep_trials(
    config: RunConfig, methods: Sequence[Method], values: Values, engine: str
) -> list[Trial]:
    """Return a run for every method and every combination of values that concern it."""
    trials, used = [], set()
    for method in methods:
        names = [name for name in values if method.takes(config, name)]
        used.update(names)
        for chosen in product(*(values[name] for name in names)):
            more = dict(zip(names, chosen, strict=True))
            labels = {"defense": method.text, **more}
            trials.append(Trial(labels, method.over(config, more), engine))
    for name in values:
        if name not in used:
            written = ", ".join(method.text for method in methods)
            raise ConfigError(f"'{name}' concerns none of the methods: {written}")
    return trials
