"""The ``flower-vfl`` command."""

import ast
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from flower_vfl.errors import ConfigError, VerticalError

_NAMES = "init run compare report audit predict inspect align key select scale sweep "
_NAMES += "matrix reproduce new"
COMMANDS = {name: name for name in _NAMES.split()}  # their modules
COMMANDS |= {"key": "align", "audit": "report", "inspect": "init"}


class Commands(TyperGroup):
    """The commands; typer would end an interrupted one without a word."""

    def invoke(self, context: typer.Context) -> Any:  # type: ignore[override]
        """Run a command; after Ctrl-C say what is kept, and exit with 130."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupted:
            kept = interrupted.args or ["run the same command to continue"]
            print("flower-vfl: interrupted", *kept, sep="; ", file=sys.stderr)
            raise typer.Exit(130) from None


class LazyCommand(TyperCommand):
    """A command that is imported, with PyTorch and Flower, when it is used."""

    def make_context(self, info_name: Any, args: Any, *more: Any, **extra: Any) -> Any:
        """Parse the arguments of the command."""
        name = str(self.name)
        command = getattr(import_module(f".{COMMANDS[name]}", __package__), name)
        if name != "new":  # which needs neither options.toml nor PyTorch
            command = import_module(".options", __package__).described(name, command)
        own = typer.Typer(add_completion=False, rich_markup_mode="rich")
        own.command(name)(command)
        parser = typer.main.get_command(own)
        hints = get_type_hints(command, include_extras=True)
        for parameter in parser.params:  # click 8.5 forgets typer's help of arguments
            if getattr(parameter, "help", "") is None:
                hint = hints[str(parameter.name)]
                about, *_ = getattr(hint, "__metadata__", [None])
                parameter.help = getattr(about, "help", None)
        if "--help-all" in args:
            args = ["--help"]
        elif not extra.get("resilient_parsing"):  # completion knows all options
            rare = getattr(command, "rare_options", ())
            for parameter in parser.params:
                parameter.hidden = parameter.name in rare  # type: ignore[attr-defined]
            if rare:
                parser.epilog = f"flower-vfl {name} --help-all shows all options."
        return parser.make_context(info_name, args, *more, **extra)


app = typer.Typer(
    name="flower-vfl",
    cls=Commands,
    help="Vertical federated learning on Flower: parties that hold different columns "
    "about the same people train one model together.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for name, module in COMMANDS.items():  # texts are read, without importing a module
    source = ast.parse(Path(__file__).with_name(f"{module}.py").read_text("utf-8"))
    functions = [node for node in source.body if isinstance(node, ast.FunctionDef)]
    texts = {node.name: ast.get_docstring(node) for node in functions}
    app.command(name, cls=LazyCommand, help=texts[name])(lambda: None)


def _show(wanted: bool) -> None:
    if wanted:
        print(*(f"{n} {version(n)}" for n in ("flower-vfl", "flwr", "torch")), sep=", ")
        raise typer.Exit


_PLUGIN = "A module or .py file with your own methods; repeatable."
_VERSION: Any = {"help": "Show versions and exit.", "callback": _show, "is_eager": True}


@app.callback()
def root(
    plugins: Annotated[list[str] | None, Option("--plugin", help=_PLUGIN)] = None,
    version: Annotated[bool, Option("--version", **_VERSION)] = False,
) -> None:
    """Vertical federated learning on Flower."""
    from flower_vfl.simulations.plugins import use_plugins

    use_plugins(plugins or [])


def main() -> None:
    """Run the command; print an error as one line without a traceback."""
    try:
        app()
    except VerticalError as error:
        from .options import as_options

        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"flower-vfl: {as_options(f'{error}{notes}')}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # a path that the user has given
        if error.filename is None:
            raise
        why = f"cannot use '{error.filename}': {error.strerror}"
        print(f"flower-vfl: {why}; check the path and its permissions", file=sys.stderr)
        sys.exit(2)
