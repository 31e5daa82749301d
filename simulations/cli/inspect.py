"""``flower-vfl inspect``: the inferred types of the columns of files."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets import infer_task, read_party_file
from flower_vfl.simulations.printing import text_table

from ..datasets.checks import check_spelling, label_warnings, written_as
from .options import AsJson, option

_HEADS = ["column", "type", "remarks", "different", "missing", "unreadable"]


def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(help="CSV or Parquet files, the label party's first."),
    ],
    id_column: Annotated[str, option("Column with the ids.", "--id")] = "id",
    label: Annotated[str, option("Label column of the first file.")] = "",
    task: Annotated[str, option("Same as for 'run'.")] = "",
    missing: Annotated[list[str] | None, option("Same as for 'run'.")] = None,
    drop: Annotated[list[str] | None, option("Same as for 'run'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the inferred type and the problems of each column.

    The exit code is 2 if a run would refuse the files.
    """
    console = Console(highlight=False, markup=False, quiet=as_json)
    chosen: Any = (drop or [], missing or [], task or None, "none")
    read, documents = {}, []
    problems: list[str] = []
    warnings: list[str] = []
    for path in map(str, files):
        own = label or None if path == str(files[0]) else None
        try:
            rows = read_party_file(path, id_column, own, *chosen)
        except ConfigError as error:
            problems.append(str(error))
            continue
        read[path], found = rows, [asdict(column) for column in rows.columns]
        problems += [f"'{path}', column '{c['name']}'" for c in found if c["problem"]]
        documents.append({"file": path, "rows": len(rows.ids), **rows.written})
        documents[-1]["columns"] = found
        console.print(f"{path}: {len(rows.ids)} rows, {written_as(rows)}")
        cells = [
            [c["name"], c["kind"], c["problem"] or c["note"]]
            + [str(c[key]) for key in _HEADS[3:]]
            for c in found
        ]
        console.print(text_table(_HEADS, cells, left=3))
    if not problems:
        try:
            check_spelling({path: rows.ids for path, rows in read.items()})
            first = read[str(files[0])].labels
            if first is not None:
                warnings += label_warnings(read, infer_task(first, chosen[2]))
        except ConfigError as error:
            problems.append(str(error))
    if as_json:
        document = {"files": documents, "problems": problems, "warnings": warnings}
        print(json.dumps(document))
    for line in [f"cannot be used: {problem}" for problem in problems] + warnings:
        console.print(line, soft_wrap=True)
    if problems:
        raise typer.Exit(2)
