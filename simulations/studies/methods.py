"""What a study compares: a defense, an objective, a preset, or several together.

``marvell:s=4`` is a defense, ``ladsg`` and ``gafm:delta=0.05`` are presets, and
``kdk`` is an objective; ``preset=`` and ``objective=`` in front say which is meant.
Parts that belong together are joined by a plus sign with spaces around it: ``gafm +
marvell:s=4``. A part may also be any other setting of a run: ``iso + width=4``.
``none`` is vanilla split learning.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.leakage.attacks import SCORE_ATTACKS
from flower_vfl.simulations.attacks import COMPLETIONS
from flower_vfl.simulations.config import ABOUT, OPTIONS, RunConfig
from flower_vfl.simulations.models import BOTTOM_MODELS, TOP_MODELS
from flower_vfl.simulations.models.registry import OPTIMIZERS
from flower_vfl.simulations.objectives import OBJECTIVES, PRESETS, preset
from flower_vfl.specs import parse_spec, split_specs
from flower_vfl.strategies import DEFENSES
from flower_vfl.strategies.defenses.registry import SHORT_NAMES

from .trials import Trial

VANILLA = "none"
Values = Mapping[str, Sequence[str]]  # of every name that is varied
_FIELDS = {f.name: str(f.type) for f in fields(RunConfig) if "panel" in ABOUT[f.name]}
_FIELDS |= {option: _FIELDS[name] for name, option in OPTIONS.items()}
_PRESET = "preset"
# Settings whose text is a name with parameters, or several of them.
SPECS = ("defense", "objective", _PRESET, "attack", "optimizer", "bottom", "top")
# Everything that has parameters, by name.
_REGISTRIES: list[Iterable[str]] = [DEFENSES, OBJECTIVES, PRESETS, SCORE_ATTACKS]
_REGISTRIES += [COMPLETIONS, OPTIMIZERS, BOTTOM_MODELS, TOP_MODELS]
_BETWEEN = re.compile(r"(\s*[|;]\s*|\s*@\s*\d+\s+)")  # the parts of a defense
_PARTY = re.compile(r"([^:=@|]+=)(.*)", re.DOTALL)


@dataclass(frozen=True)
class Method:
    """Settings that are compared with others, as texts."""

    text: str
    settings: Mapping[str, str]

    def over(self, config: RunConfig, more: Mapping[str, str]) -> RunConfig:
        """Return a run's settings with this method, and with values for a few more."""
        base = {name: str(getattr(config, name)) for name in SPECS if name != _PRESET}
        texts = {**base, **self.settings}
        for name, value in more.items():
            if "." in name:
                _set_parameter(texts, name, value)
            else:
                texts[setting_name(name)] = value
        chosen = preset(texts.pop(_PRESET)) if _PRESET in texts else {}
        texts = {n: t for n, t in texts.items() if n not in base or t != base[n]}
        texts = {n: str(value) for n, value in chosen.items()} | texts
        if texts.get("defense") == VANILLA:
            texts["defense"] = ""
        return replace(config, **{n: typed(n, text) for n, text in texts.items()})

    def takes(self, config: RunConfig, name: str) -> bool:
        """Return whether a value for some name means anything for this method."""
        if "." not in name:
            return True
        where = name.partition(".")[0]
        setting = _canonical(where)
        for field in SPECS:
            text = self.settings.get(field, getattr(config, field, ""))
            names = [full_name(n) for n in _names(field, text) if n != VANILLA]
            if full_name(where) in names or (names and field == setting):
                return True
        return False


def parse_method(text: str) -> Method:
    """Return the method that a text names."""
    settings: dict[str, str] = {}
    for part in re.split(r"\s\+\s", text.strip()):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not (equals and (name in _FIELDS or name == _PRESET)):
            name, value = _kind(part), part.strip()
        name = _canonical(name)
        if not value:
            raise ConfigError(f"'{text}': '{part}' has no value")
        if name in settings:
            raise ConfigError(f"'{text}' gives the {name} twice")
        settings[name] = value
    own = preset(settings[_PRESET]) if _PRESET in settings else {}
    if given := set(own) & set(settings) & set(SPECS):
        problem = f"'{text}': the preset has a {min(given)} of its own"
        raise ConfigError(f"{problem}; give only one of them")
    return Method(text.strip(), settings)


def _kind(text: str) -> str:
    """Return which setting a part without one is for: a defense, if it may be one."""
    name = text.partition(":")[0].strip()
    if full_name(name) in DEFENSES:
        return "defense"
    objective = "objective" if name in OBJECTIVES else "defense"
    return _PRESET if name in PRESETS else objective


def setting_name(name: str) -> str:
    """Return the name of a setting as `RunConfig` has it, or refuse an unknown one."""
    if name.replace("-", "_") not in _FIELDS:
        raise unknown_name("setting", name, [n.replace("_", "-") for n in _FIELDS])
    return _canonical(name)


def _canonical(name: str) -> str:
    plain = name.replace("-", "_")
    return {option: field for field, option in OPTIONS.items()}.get(plain, plain)


def typed(name: str, text: str) -> Any:
    """Return the value of a setting that is given as a text."""
    kind = _FIELDS[name]
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return {"str": str, "int": int, "float": float}[kind](text)
    except (KeyError, ValueError):
        words = {"bool": "true or false", "int": "an integer", "float": "a number"}
        raise ConfigError(f"{name} must be {words[kind]}, got '{text}'") from None


def full_name(name: str) -> str:
    """Return the full name of a defense that is given by a short one."""
    return SHORT_NAMES.get(name, name)


def _pieces(setting: str, text: str) -> list[str]:
    """Cut a text into specs, at even places, and what is between them."""
    if not text.strip():
        return []
    if setting == "defense":
        pieces = []
        for number, piece in enumerate(_BETWEEN.split(text)):
            party = None if number % 2 else _PARTY.match(piece)
            pieces += [piece] if party is None else ["", party[1], party[2]]
        return pieces
    if setting == "attack":
        return [p for part in split_specs(text) for p in (part, ",")][:-1]
    return [text]


def _names(setting: str, text: str) -> Iterator[str]:
    for spec in filter(str.strip, _pieces(setting, text)[::2]):
        yield parse_spec(spec.strip())[0]


def _set_parameter(texts: dict[str, str], name: str, value: str) -> None:
    """Give a parameter a value, in the text of a setting or wherever a method is."""
    where, _, parameter = name.partition(".")
    setting = _canonical(where)
    found = 0
    for field in [setting] if setting in SPECS else SPECS:
        pieces = _pieces(field, texts.get(field, ""))
        for index in range(0, len(pieces), 2):
            if not pieces[index].strip():
                continue
            method, parameters = parse_spec(pieces[index].strip())
            if setting in SPECS or full_name(method) == full_name(where):
                parameters[parameter] = value
                written = ",".join(f"{k}={v}" for k, v in parameters.items())
                pieces[index] = f"{method}:{written}"
                found += 1
        if pieces:
            texts[field] = "".join(pieces)
    if found != 1:
        known = sorted({n for s in SPECS for n in _names(s, texts.get(s, ""))})
        problem = "stands for several methods" if found else "stands for no method"
        remedy = f"write <method>.{parameter} with one of {', '.join(known)}"
        raise ConfigError(f"'{name}' {problem}; {remedy}")


def parse_values(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of every name that is varied."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, rest = (part.strip() for part in text.partition("="))
        cut = rest.split(";") if ";" in rest else split_specs(rest)
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
    known = [*SPECS, *dict.fromkeys(name for each in _REGISTRIES for name in each)]
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
