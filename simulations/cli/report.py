"""``flower-vfl report``: one HTML file about a study or a run."""

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from flower_vfl.simulations.report import PICTURES_FOLDER, write_report

from .options import AsJson, option


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a study, or the --out folder of a run.")
    ],
    pictures: Annotated[
        bool, option("Also write every chart as SVG and PNG.", "--pictures")
    ] = False,
    opened: Annotated[bool, option("Open it in a browser.", "--open")] = False,
    as_json: AsJson = False,
) -> None:
    """Write report.html: tables and charts in one self-contained file."""
    path = write_report(folder, pictures)
    drawn = sorted((folder / PICTURES_FOLDER).iterdir()) if pictures else []
    if as_json:
        print(json.dumps({"report": str(path), "pictures": [str(p) for p in drawn]}))
    else:
        if drawn:
            print(f"{len(drawn)} pictures in {folder / PICTURES_FOLDER}")
        print(path)
    if opened:
        webbrowser.open(path.resolve().as_uri())
