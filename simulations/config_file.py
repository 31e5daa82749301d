"""Settings of a run from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from flower_vfl.errors import ConfigError
from flower_vfl.strategies import build_defense, defense_spec

from .attacks import split_attacks
from .config import RunConfig

OPTIONS = {"bottom": "model"}  # settings whose option has another name
LISTS = ("passive", "attack")  # comma-separated text, repeatable options
_OF_RUN = {"out", "resume"}  # options of `run` only
_SETTABLE = {f.name for f in fields(RunConfig) if f.metadata["panel"]} | _OF_RUN


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file by the keys of Flower's run config."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not TOML: {error}") from error
    defense = settings.get("defense")
    if isinstance(defense, dict | list):
        settings["defense"] = defense_spec(build_defense(defense))
    for name in LISTS:
        if isinstance(settings.get(name), list):
            settings[name] = ",".join(map(str, settings[name]))
    files = [name for name in str(settings.get("passive", "")).split(",") if name]
    counted = {"parties": len(files)} if files else {}
    RunConfig.from_run_config({**counted, **settings})  # checks keys and types
    return settings


def defaults_of(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file by the names of the options of ``run``."""
    defaults: dict[str, Any] = {}
    for name, value in read_settings(path).items():
        option = name.replace("-", "_")
        if option not in _SETTABLE:
            raise ConfigError(
                f"'{path}': '{name}' is set by the command itself; use it with flwr run"
            )
        if name == "out" and not value:
            continue  # an empty path would be the current folder
        if name in LISTS:
            value = split_attacks(value)
        defaults[OPTIONS.get(option, option)] = value
    return defaults


def use_as_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Make the settings of a file the defaults of a command's options."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **defaults_of(path)}
    return path
