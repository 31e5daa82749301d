"""``flower-vfl init`` and ``inspect``: what files hold, and settings for a run."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import typer
from rich.console import Console

from flower_vfl.alignment.ids import encode_ids, spelled_alike
from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets import infer_task, read_party_file
from flower_vfl.simulations.printing import print_json, text_table

from ..datasets.party_files import PartyFile, check_spelling, label_warnings, written_as
from ..datasets.reading import read_cells

_HEADS = ["column", "type", "remarks", "different", "missing", "unreadable"]
_LABELS = ("label", "target", "y", "class")  # usual names
_DROPPED = """
# Columns that cannot be used as they are; the remarks below say why. Instead of the
# option --missing 'x', write missing = ["x"] here."""
_USUAL = """\
# Other settings, with their defaults; flower-vfl run --help-all explains them.
# epochs = 20
# batch-size = 256
# defense = ""                      # e.g. "marvell:s=4"
# attack = []                       # e.g. ["norm", "cosine"]
"""


def init(
    files: list[Path] | None = None,
    label: str = "",
    id_column: str = "",
    task: str = "",
    missing: list[str] | None = None,
    out: Path = Path("data.toml"),
) -> None:
    """Look at your files and write a commented configuration for 'run --config'.

    What is not given is asked for on a terminal.
    """
    if out.exists():
        raise ConfigError(f"'{out}' exists already; choose another file with --out")
    paths = [str(path) for path in files or _ask_files()]
    if len(set(paths)) < 2:
        raise ConfigError("give at least two files: one with the labels, and others")
    tables = {path: read_cells(Path(path), id_column or "id")[0] for path in paths}
    ids = id_column or _guess_id(tables)
    label = label or _ask_label(tables, ids)
    holders = [path for path in paths if label in tables[path]]
    if not holders:
        raise ConfigError(f"no file has a column '{label}'; {_columns(tables)}")
    paths.sort(key=lambda path: path != holders[0])
    text, notes = _settings(paths, ids, label, task, missing or [])
    with out.open("x", encoding="utf-8") as file:
        file.write(f"# Next: flower-vfl run --config {out}\n")
        file.write(f"#       flower-vfl compare --config {out}\n\n{text}")
    print(*notes, f"wrote {out}; next: flower-vfl run --config {out}", sep="\n")


def _settings(
    paths: list[str], ids: str, label: str, task: str, missing: list[str]
) -> tuple[str, list[str]]:
    """Return the configuration, and what the user should know about it."""
    chosen: Any = {"missing": missing, "task": task or None}

    def read_all(**more: Any) -> dict[str, PartyFile]:
        owns = [label, *([None] * (len(paths) - 1))]
        both = zip(paths, owns, strict=True)
        return {p: read_party_file(p, ids, own, **chosen, **more) for p, own in both}

    columns = [c for rows in read_all(check="id").values() for c in rows.columns]
    bad = {column.name: column.problem for column in columns if column.problem}
    if label in bad:
        raise ConfigError(f"'{paths[0]}', column '{label}': {bad[label]}")
    for text in [*paths, *bad, *missing]:
        if "," in text:
            raise ConfigError(f"'{text}' has a comma in its name; rename it")
    read = read_all(drop=list(bad))
    aligned = _alignment(read)
    labels = infer_task(read[paths[0]].labels, chosen["task"])  # type: ignore[arg-type]
    warnings = list(label_warnings(read, labels, aligned.get("normalise", "")))
    settings = {"label-party": paths[0], "passive": paths[1:], "id-column": ids}
    settings |= {"label-column": label, "task": labels.task, "missing": missing}
    lines = [_line(name, value) for name, value in settings.items() if value]
    if bad:
        lines += [_DROPPED, _line("drop", list(bad))]
    if "alignment" in aligned:
        lines += ["", "# The files hold different ids: train on those that all share."]
        lines += ['# "psu" trains on the union and does not reveal which are shared.']
    lines += [_line(name, value) for name, value in aligned.items()]
    lines += [f"# {_one_line(line)}" for line in warnings]
    lines += ["", _USUAL, *_remarks(read, bad)]
    notes = [f"left out: column '{name}': {why}" for name, why in bad.items()]
    notes += [f"alignment {aligned['alignment']}"] if "alignment" in aligned else []
    return "\n".join(lines) + "\n", [*map(_one_line, notes), *warnings]


def _remarks(read: Mapping[str, PartyFile], bad: Mapping[str, str]) -> Iterator[str]:
    """Yield a comment for each file and each of its columns."""
    for path, rows in read.items():
        yield f"# {path}: {len(rows.ids)} rows, {written_as(rows)}"
        for column in rows.columns:
            share = column.missing / len(rows.ids)
            told = [column.note, f"{share:.0%} missing" if share else ""]
            told.append(bad.get(column.name, "") if column.kind == "left out" else "")
            if column.kind == "number" and column.different == len(rows.ids):
                values = rows.features[column.name]
                told.append("" if (values % 1).any() else "different in every row: id?")
            text = "; ".join(filter(None, told))
            text = f"{column.name}: {column.kind}{text and '; '}{text}"
            yield f"#   {_one_line(text)}"
        yield "#"


def _alignment(read: Mapping[str, PartyFile]) -> dict[str, str]:
    """Return the settings that make the ids of the files comparable."""
    first, *others = (set(map(str, rows.ids)) for rows in read.values())
    alike = [found for other in others if (found := spelled_alike(first, other))]
    settings = {"normalise": alike[0][0]} if alike else {}
    change = settings.get("normalise")
    same = [set(encode_ids(each, change)) for each in (first, *others)]
    if any(keys != same[0] for keys in same):
        if not set.intersection(*same):
            raise ConfigError("the files share no id; choose another column with --id")
        settings["alignment"] = "psi"
    return settings


def _guess_id(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the column that all files share and whose values do not repeat."""
    first, *others = tables.values()
    shared = [str(c) for c in first if all(c in other for other in others)]
    found = [c for c in shared if all(t[c].is_unique for t in tables.values())]
    named = [c for c in found if c.lower().endswith("id")]
    for names in (named, found):
        if len(names) == 1:
            return names[0]
    if not found:
        text = "no column is in every file with a different value in each row"
        both = [(path, name) for name in shared for path in tables]
        told = [
            f"'{n}' repeats in '{p}'" for p, n in both if not tables[p][n].is_unique
        ]
        why = ", ".join(told) or "the column with the ids needs one name in all files"
        raise ConfigError(f"{text}: {why}; {_columns(tables)}")
    return _ask(f"Id column ({', '.join(found)})", "--id", found[0])


def _ask_files() -> list[Path]:
    found = [_ask("File of the party with the labels", "the files", "")]
    while file := typer.prompt("File of another party (empty: no more)", default=""):
        found.append(file)
    return [Path(file).expanduser() for file in found]


def _ask_label(tables: Mapping[str, pd.DataFrame], ids: str) -> str:
    names = [str(name) for table in tables.values() for name in table if name != ids]
    usual = [name for name in names if name.lower() in _LABELS]
    print(_columns(tables)) if sys.stdin.isatty() else None
    return _ask("Label column", "--label", usual[0] if usual else "")


def _ask(question: str, option: str, default: str) -> str:
    """Return the answer to a question, which needs a terminal."""
    if not sys.stdin.isatty():
        example = "flower-vfl init bank.csv shop.csv --label y --id id"
        raise ConfigError(f"give {option}, as in: {example}")
    return str(typer.prompt(question, default=default or None))


def _columns(tables: Mapping[str, pd.DataFrame]) -> str:
    named = {path: ", ".join(map(str, table)) for path, table in tables.items()}
    return "; ".join(f"'{path}' has {names}" for path, names in named.items())


def _line(name: str, value: object) -> str:
    return f"{name} = {json.dumps(value, ensure_ascii=False)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def inspect(
    files: list[Path],
    id_column: str = "id",
    label: str = "",
    task: str = "",
    missing: list[str] | None = None,
    drop: list[str] | None = None,
    as_json: bool = False,
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
        about = {"file": path, "rows": len(rows.ids), **rows.written}
        documents.append({**about, "columns": found})
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
        print_json(document)
    for line in [f"cannot be used: {problem}" for problem in problems] + warnings:
        console.print(line, soft_wrap=True)
    if problems:
        raise typer.Exit(2)
