"""Config strings with a name and parameters: ``"mlp:hidden=64+32,dropout=0.1"``."""

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError, check_name

T = TypeVar("T")

_EMPTY = inspect.Parameter.empty
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FORM = "expected 'name' or 'name:key=value,key=a+b'"
_SCALARS: dict[Any, str] = {bool: "true or false", int: "an integer"}
_SCALARS |= {float: "a number", str: "text", type(None): "none"}
_CHOICES: dict[Any, tuple[Any, ...]] = {bool: (True, False), type(None): (None,)}
_UNIONS, _SEQUENCES = (Union, types.UnionType), (tuple, Sequence)
_NEXT = re.compile(r",(?!\s*\w+\s*=)")  # a comma that no parameter follows


def split_specs(text: str) -> list[str]:
    """Split a setting into its config strings."""
    return [part.strip() for part in _NEXT.split(text) if part.strip()]


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """Split a config string into a name and its parameters as text."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"'{text}' does not start with a name; {_FORM}")
    if not colon:
        return name, {}
    parameters: dict[str, str] = {}
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (equals and key.isidentifier() and value):
            raise ConfigError(f"'{text}': '{part}' is not a key=value; {_FORM}")
        if key in parameters:
            raise ConfigError(f"'{text}' gives the parameter '{key}' twice")
        parameters[key] = value
    return name, parameters


def build_from_spec(
    kind: str, text: str, known: Mapping[str, Callable[..., T]], *given: object
) -> T:
    """Build the object that a config string describes."""
    name, raw = parse_spec(text)
    check_name(kind, name, known)
    factory = known[name]
    arguments = typed_arguments(kind, name, raw, factory, len(given))
    try:
        return factory(*given, **arguments)
    except ConfigError as error:
        raise ConfigError(f"{kind} '{name}': {error}") from error


def typed_arguments(
    kind: str,
    name: str,
    raw: Mapping[str, str],
    factory: Callable[..., object],
    given: int = 0,
) -> dict[str, Any]:
    """Convert text parameters to the types of a callable's signature."""
    settable = {
        parameter.name: parameter
        for parameter in _parameters(factory)[given:]
        if parameter.kind in _NAMED and _describe(_wanted(parameter)) is not None
    }
    what = f"{kind} '{name}'"
    shown = ", ".join(map(_show, settable.values()))
    known = f"known parameters: {shown}" if shown else "it takes no parameters"
    arguments: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in settable:
            raise ConfigError(f"{what}: unknown parameter '{key}'; {known}")
        wanted = _wanted(settable[key])
        try:
            arguments[key] = _convert(value, wanted)
        except ValueError:
            needed = f"must be {_describe(wanted)}, got '{value}'; {known}"
            raise ConfigError(f"{what}: parameter '{key}' {needed}") from None
    required = [key for key, each in settable.items() if each.default is _EMPTY]
    if missing := [key for key in required if key not in raw]:
        raise ConfigError(f"{what} needs a value for {', '.join(missing)}; {known}")
    return arguments


def _parameters(factory: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters of a callable, with types for annotations."""
    if isinstance(factory, type) and is_dataclass(factory):
        hints = get_type_hints(factory)  # of inherited fields, from their own modules
        found = inspect.signature(factory).parameters
        return [found[name].replace(annotation=hints[name]) for name in found]
    return list(inspect.signature(factory, eval_str=True).parameters.values())


def _wanted(parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter: its annotation, or its default's type."""
    if parameter.annotation is not _EMPTY:
        return parameter.annotation
    if parameter.default is _EMPTY:
        return str
    if isinstance(parameter.default, tuple) and parameter.default:
        return types.GenericAlias(tuple, (type(parameter.default[0]), Ellipsis))
    return type(parameter.default)


def _show(parameter: inspect.Parameter) -> str:
    """Write a parameter and its default as in a config string."""
    if parameter.default is _EMPTY:
        return f"{parameter.name} (required)"
    return f"{parameter.name}={write_value(parameter.default)}"


def write_spec(name: str, built: object, factory: Callable[..., object]) -> str:
    """Return the config string that describes an object."""
    parameters = []
    for parameter in _parameters(factory):
        value = getattr(built, parameter.name)
        if value != parameter.default:
            parameters.append(f"{parameter.name}={write_value(value)}")
    return f"{name}:{','.join(parameters)}" if parameters else name


def write_value(value: object) -> str:
    """Write a value as it stands in a config string."""
    if value is None or value in ((), []):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "+".join(map(write_value, value))
    return str(value)


def _describe(wanted: Any) -> str | None:
    """Describe the values of a type; None if text cannot be converted to it."""
    if wanted in _SCALARS:
        return _SCALARS[wanted]
    if get_origin(wanted) is Literal:
        return "one of " + ", ".join(map(write_value, get_args(wanted)))
    if get_origin(wanted) in _UNIONS:
        words = [word for member in get_args(wanted) if (word := _describe(member))]
        return " or ".join(words) if words != ["none"] else None
    if get_origin(wanted) in _SEQUENCES:
        inner = _describe(get_args(wanted)[0])
        return inner and f"values joined by '+', each {inner}"
    return None


def _convert(text: str, wanted: Any) -> Any:
    """Convert text to a type; raise ValueError if it does not fit."""
    if wanted in _CHOICES or get_origin(wanted) is Literal:
        text = text.lower() if wanted in _CHOICES else text
        choices = _CHOICES.get(wanted) or get_args(wanted)
        return choices[list(map(write_value, choices)).index(text)]
    if wanted in (int, float, str):
        value = wanted(text)
        if value != value:
            raise ValueError(text)
        return value
    if get_origin(wanted) in _UNIONS:
        return _convert_union(text, get_args(wanted))
    if get_origin(wanted) in _SEQUENCES:
        return _convert_items(text, get_args(wanted))
    raise ValueError(text)


def _convert_union(text: str, members: tuple[Any, ...]) -> Any:
    """Use the first member that fits, trying None first and text last."""
    for member in sorted(members, key=lambda m: (m is not type(None), m is str)):
        try:
            return _convert(text, member)
        except ValueError:
            continue
    raise ValueError(text)


def _convert_items(text: str, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert ``a+b``, checking the length of a fixed tuple."""
    parts = [] if text.lower() == "none" else [p.strip() for p in text.split("+")]
    if len(items) == 1 or items[-1] is Ellipsis:
        items = (items[0],) * len(parts)
    if len(parts) != len(items):
        raise ValueError(text)
    return tuple(_convert(p, item) for p, item in zip(parts, items, strict=True))
