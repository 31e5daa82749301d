"""Options of commands: settings of a run, also from a TOML file, and shared ones."""

import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from flower_vfl.alignment import GROUPS, NORMALISERS
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks import SCORE_ATTACKS
from flower_vfl.parties.imputation import FEATURE_SYNTHESIZERS, LABEL_SYNTHESIZERS
from flower_vfl.simulations.attacks import COMPLETIONS
from flower_vfl.simulations.config import ABOUT, LISTS, OPTIONS, TYPES, RunConfig, parts
from flower_vfl.simulations.datasets import dataset_names
from flower_vfl.simulations.datasets.reading import SUFFIXES
from flower_vfl.simulations.models import BOTTOM_MODELS, TOP_MODELS
from flower_vfl.simulations.models.registry import OPTIMIZERS
from flower_vfl.simulations.objectives import OBJECTIVES, PRESETS, preset
from flower_vfl.simulations.printing import print_json
from flower_vfl.simulations.report import write_report
from flower_vfl.simulations.studies.study import Study
from flower_vfl.specs import split_specs
from flower_vfl.strategies import CODECS, DEFENSES, TRACKERS
from flower_vfl.strategies.defenses.registry import build_defense, defense_spec

_TABLES = tomllib.loads(Path(__file__).with_name("options.toml").read_text("utf-8"))
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
# Settings in the short help, and options of commands that are not in it.
_COMMON = "dataset parties label_party passive id_column label_column alignment bottom "
_COMMON += "epochs batch_size learning_rate seed defense label_dp attack"
_RARE = {"preset_name", "alone", "markdown", "engine", "ray_address", "gpus"}
_RARE |= {"format", "verbose"}
_SETTINGS = {f.name for f in fields(RunConfig) if "panel" in ABOUT[f.name]}
_SETTABLE = _SETTINGS | {"out", "resume"}  # which are options of `run` only
_API_NAMES = {  # in errors, and the option that stands for each
    r"resume=True|(?<=with )resume|(?<=without )resume": "--resume",
    r"Checkpoints\(every=\.\.\.(, folder=\.\.\.)?\)": "--out and --checkpoint-every",
    r'(, D\S* at="label"\))? \(defense-at="label" in .*\)': " (--defense-at label)",
}
_API_NAMES |= {
    rf"(?<![\w/.'-]){name}(?![\w/'=-]|\.\w)": f"--{name.replace('_', '-')}"
    for name in sorted(_SETTABLE - set(OPTIONS))
    if "_" in name
}


def option(help: str, *names: str, panel: str = "Run", **more: Any) -> Any:
    """Return an option of a command in a panel of its help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def results_folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path of a folder for results; refuse that of a file."""
    if path is not None and (path.is_file() or path.name.lower().endswith(SUFFIXES)):
        name = option.opts[0]
        raise ConfigError(f"{name} names a folder for results, but '{path}' is a file")
    return path


def described(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """Give the parameters of a command the options that ``options.toml`` has."""
    texts = {**_TABLES["shared"], **_TABLES.get(name, {})}
    parameters = [
        p.replace(annotation=Annotated[p.annotation, _declared(texts[p.name])])
        if p.name in texts and get_origin(p.annotation) is not Annotated
        else p
        for p in inspect.signature(command, eval_str=True).parameters.values()
    ]

    return _with_parameters(command, parameters)


def _declared(about: str | dict[str, Any]) -> Any:
    """Return the option or the argument of a command that a table describes."""
    about = {"help": about} if isinstance(about, str) else about
    text = about["help"].format(**(registered() if "{" in about["help"] else {}))
    if about.get("argument"):
        return typer.Argument(help=text)
    names = [about["option"]] if "option" in about else []
    more: Any = {name: about[name] for name in ("panel", "min") if name in about}
    more |= {"callback": results_folder} if about.get("folder") else {}
    return option(text, *names, **more)


def _with_parameters(
    call: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Give a function parameters that typer reads."""
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def takes_settings(
    base: RunConfig | None = None, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting of a run, and ``--config``.

    The command receives the settings as its first argument, ``config``. Its help has
    the options that most runs need; ``--help-all`` has all of them.
    """
    defaults, known = base or RunConfig(), set(_SETTINGS) - set(without)
    chosen = [f for f in fields(RunConfig) if f.name in known]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=_KEYWORD) for p in signature.parameters.values()][1:]
        given = [_option(f, getattr(defaults, f.name)) for f in chosen]
        about = _declared(_TABLES["shared"]["preset_name"])
        presets = [_parameter("preset_name", str, "", about)]
        given += [] if "defense" in without else presets
        text = "TOML file with any of these settings; options override it."
        about = option(text, "--config", callback=use_as_defaults, is_eager=True)
        given.append(_parameter("config_file", Path | None, None, about))

        @functools.wraps(command)
        def call(**values: Any) -> None:
            values.pop("config_file")
            named = {f.name: values.pop(_name(f)) for f in chosen}
            preset_name = values.pop("preset_name", "")
            command(_settings(named, defaults, preset_name), **values)

        others = {_name(f) for f in chosen if f.name not in _COMMON.split()}
        call.rare_options = _RARE | others  # type: ignore[attr-defined]
        return _with_parameters(call, [*given, *own])

    return decorate


def _name(field: Field[Any]) -> str:
    return OPTIONS.get(field.name, field.name)


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    kind = Annotated[kind, option]
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=kind)


def _option(field: Field[Any], default: Any) -> inspect.Parameter:
    """Return the parameter of a command for one setting."""
    name, about = _name(field), ABOUT[field.name]
    text = about["help"].format(**registered())
    given = option(text, f"--{name.replace('_', '-')}", panel=about["panel"])
    if field.name in LISTS:
        return _parameter(name, list[str] | None, parts(default) or None, given)
    return _parameter(name, TYPES[str(field.type)], default, given)


def registered() -> dict[str, str]:
    """Return the names that replace the placeholders of a setting's help."""
    names: dict[str, Iterable[str]] = {"datasets": dataset_names(), "groups": GROUPS}
    names |= {"bottoms": BOTTOM_MODELS, "tops": TOP_MODELS, "objectives": OBJECTIVES}
    names |= {"presets": PRESETS, "optimizers": OPTIMIZERS, "defenses": DEFENSES}
    names |= {"codecs": CODECS, "scores": SCORE_ATTACKS, "completions": COMPLETIONS}
    names |= {"label_imputers": LABEL_SYNTHESIZERS, "normalisers": NORMALISERS}
    names |= {"feature_imputers": FEATURE_SYNTHESIZERS, "trackers": TRACKERS}
    return {key: ", ".join(known) for key, known in names.items()}


def _settings(
    values: dict[str, Any], defaults: RunConfig, preset_name: str
) -> RunConfig:
    """Return the settings that the options describe."""
    files = [Path(file).resolve() for file in values.get("passive") or []]
    values["parties"] = len(files) or values.get("parties", defaults.parties)
    values["passive"] = files
    for name in LISTS:
        values[name] = ",".join(map(str, values.get(name) or []))
    for name in ("data_dir", "label_party"):
        if values.get(name):
            values[name] = str(Path(values[name]).resolve())
    if preset_name:
        chosen = preset(preset_name)
        for name in ("defense", "objective"):
            if name in chosen and values[name] != getattr(defaults, name):
                raise ConfigError(f"--preset {preset_name} replaces --{name}")
        values |= chosen
    # every command with these options is a simulation
    return RunConfig(**{**vars(defaults), **values, "reproducible_noise": True})


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
    files = len(parts(str(settings.get("passive", ""))))
    counted = {"parties": files} if files else {}
    RunConfig.from_run_config({**counted, **settings})  # checks keys and types
    return settings


def defaults_of(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file by the names of the options of ``run``."""
    defaults: dict[str, Any] = {}
    for name, value in read_settings(path).items():
        option = name.replace("-", "_")
        if option not in _SETTABLE:
            text = f"'{name}' is set by the command itself; use it with flwr run"
            raise ConfigError(f"'{path}': {text}")
        if value or name != "out":  # an empty path would be the current folder
            value = split_specs(value) if name in LISTS else value
            defaults[OPTIONS.get(option, option)] = value
    return defaults


def use_as_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Make the settings of a file the defaults of a command's options."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **defaults_of(path)}
    return path


def source_of(config: RunConfig) -> str:
    """Return the name of a run's data."""
    return Path(config.label_party).stem or config.dataset


def as_options(text: str) -> str:
    """Return an error with the options of the commands in place of API names."""
    for pattern, option in _API_NAMES.items():
        text = re.sub(pattern, option, text)
    return text


def show_errors(study: Study) -> None:
    """Print which runs failed, and why."""
    labels = {trial["key"]: trial["labels"] for trial in study.trials}
    for key, error in study.errors.items():
        what = ", ".join(f"{name} {value}" for name, value in labels[key].items())
        print(f"flower-vfl: {what}: {as_options(error['error'])}", file=sys.stderr)
    if study.errors:
        failed = f"{len(study.errors)} of {len(study.trials)} runs failed"
        remedy = "run the same command to retry them"
        print(f"flower-vfl: {failed}; {remedy}", file=sys.stderr)


def finish(
    study: Study, found: dict[str, Any], as_json: bool, show: Callable[[], None]
) -> None:
    """Print what a study found, write its report; exit with 1 if a run failed."""
    if study.documents and not as_json:
        show()
    report = None
    try:
        report = str(write_report(study.folder)) if study.documents else None
    except ConfigError as error:  # without its extra there is a table all the same
        print(f"flower-vfl: {error}", file=sys.stderr)
    if as_json:
        print_json(found | {"folder": str(study.folder), "report": report})
    show_errors(study)
    if report and not as_json:
        print(report)
    if study.errors:
        raise typer.Exit(1)
