"""The ``flower-vfl`` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.simulations.plugins import use_plugins
from flower_vfl.simulations.runtime.engines import set_log

from .align import align, key
from .compare import compare
from .predict import predict_saved, write_predictions
from .report import report
from .reproduce import reproduce
from .run import run
from .scale import scale
from .select import select
from .sweep import sweep

app = typer.Typer(
    name="flower-vfl",
    help="Vertical federated learning on Flower: parties that hold different columns "
    "about the same people train one model together.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(select)
app.command()(reproduce)
app.command()(scale)
app.command()(compare)
app.command()(sweep)
app.command()(align)
app.command()(key)
app.command()(report)


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


@app.command()
def predict(
    run_folder: Annotated[Path, typer.Argument(help="The --out folder of a run.")],
    split: Annotated[
        str, typer.Option(help="Split to predict: test, valid or train.")
    ] = "test",
    label_party: Annotated[
        str, typer.Option(help="New rows of the label party (runs on files only).")
    ] = "",
    passive: Annotated[
        list[str] | None,
        typer.Option(
            help="New rows of a passive party; repeat in the order of the run."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file to write; default: standard output."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the predictions as JSON.")
    ] = False,
) -> None:
    """Predict with the saved model of a run."""
    set_log(verbose=False)
    files = [label_party, *(passive or [])] if label_party or passive else []
    frame = predict_saved(run_folder, split, files)
    if as_json:
        print(frame.to_json(orient="records"))
    else:
        write_predictions(frame, out)


def main() -> None:
    """Run the command; print an error as one line without a traceback."""
    try:
        app()
    except VerticalError as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"flower-vfl: {error}{notes}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("flower-vfl: interrupted", file=sys.stderr)
        sys.exit(130)
