"""The ``flower-vfl`` command."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.simulations.plugins import use_plugins

from .align import align, key
from .compare import compare
from .inspect import inspect
from .options import as_options
from .predict import predict
from .report import report
from .reproduce import reproduce
from .run import run
from .scale import scale
from .select import select
from .sweep import sweep


class Commands(TyperGroup):
    """The commands; typer would end an interrupted one without a word."""

    def invoke(self, context: typer.Context) -> Any:  # type: ignore[override]
        """Run a command; after Ctrl-C say what is kept, and exit with 130."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupted:
            kept = interrupted.args or ["the same command goes on with what is kept"]
            print("flower-vfl: interrupted", *kept, sep="; ", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="flower-vfl",
    cls=Commands,
    help="Vertical federated learning on Flower: parties that hold different columns "
    "about the same people train one model together.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for command in (run, select, reproduce, scale, compare, sweep):
    app.command()(command)
for command in (inspect, align, key, report, predict):
    app.command()(command)


@app.callback()
def root(
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            help="A module or .py file with your own methods; repeatable.",
        ),
    ] = None,
) -> None:
    """Vertical federated learning on Flower."""
    use_plugins(plugins or [])


def main() -> None:
    """Run the command; print an error as one line without a traceback."""
    try:
        app()
    except VerticalError as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"flower-vfl: {as_options(f'{error}{notes}')}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
