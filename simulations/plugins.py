"""Plugins: modules that register defenses, attacks, objectives and presets by name.

A plugin, a module or a ``.py`` file, has one or more of the registries below as
dictionaries. The environment variable reaches every process of a run on this machine.
In a deployment each node sets its own: the server must not decide what code it loads.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks import SCORE_ATTACKS
from flower_vfl.specs import typed_arguments
from flower_vfl.strategies import DEFENSES

from .config import parts
from .objectives import OBJECTIVES, PRESETS

VARIABLE = "FLOWER_VFL_PLUGINS"
GROUP = "flower_vfl.plugins"
ADDED: dict[str, list[str]] = {}  # names that plugins have added to each registry
_REGISTRIES: dict[str, Any] = {"DEFENSES": DEFENSES, "SCORE_ATTACKS": SCORE_ATTACKS}
_REGISTRIES |= {"OBJECTIVES": OBJECTIVES, "PRESETS": PRESETS}
_LOADED: set[str] = set()  # a plugin is loaded once per process


def plugin_names() -> list[str]:
    """Return the plugins that the environment variable lists."""
    return parts(os.environ.get(VARIABLE, ""))


def use_plugins(names: Iterable[str]) -> None:
    """Load plugins, modules or ``.py`` files, here and in processes started here."""
    known = [*plugin_names(), *names]
    if known:  # absolute paths: another process may have another working folder
        paths = [str(Path(n).resolve()) if n.endswith(".py") else n for n in known]
        os.environ[VARIABLE] = ",".join(dict.fromkeys(paths))
    load_plugins()


def load_plugins(names: Iterable[str] | None = None) -> None:
    """Register the methods of plugins, modules or ``.py`` files, not loaded yet.

    Without names, these are installed plugins and those of the environment variable.
    """
    if names is None:
        names = [*_installed(), *plugin_names()]
    for name in names:
        if name not in _LOADED:
            _register(name, _import(name))
            _LOADED.add(name)


@cache  # every party asks, and all installed packages are looked through
def _installed() -> list[str]:
    return [entry.module for entry in entry_points(group=GROUP)]


def added(kind: str, given: int = 0) -> list[str]:
    """Return what plugins added and what can be built without parameters."""
    ready = []
    for name in ADDED.get(kind, []):
        method = _REGISTRIES[kind][name]
        build = method[0] if kind == "OBJECTIVES" else method
        with suppress(ConfigError):
            typed_arguments(kind, name, {}, build, given)
            ready.append(name)
    return ready


def _import(name: str) -> ModuleType:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = Path(name).resolve()
        # A unique name: type hints are looked up by it.
        full = f"flower_vfl_plugin_{len(_LOADED)}_{path.stem}"
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None and spec.loader is not None  # true for a .py file
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # a module may raise anything while it is loaded
        text = f"cannot load the plugin '{name}': {type(error).__name__}: {error}"
        remedy = "give a module that Python can import, or the path of a .py file"
        raise ConfigError(f"{text}; {remedy}") from error


def _register(plugin: str, module: ModuleType) -> None:
    own = {kind: getattr(module, kind) for kind in _REGISTRIES if hasattr(module, kind)}
    if not own:
        raise ConfigError(f"the plugin '{plugin}' has none of {', '.join(_REGISTRIES)}")
    for kind, methods in own.items():
        for name, method in methods.items():
            if name in _REGISTRIES[kind]:
                text = f"{kind}, which already has it; choose another name"
                raise ConfigError(f"the plugin '{plugin}' adds '{name}' to {text}")
            _REGISTRIES[kind][name] = method
            ADDED.setdefault(kind, []).append(name)
