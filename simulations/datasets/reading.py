"""Read a table: how its file is written, and what each column is taken for."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flower_vfl.errors import TableError

SUFFIXES = (".csv", ".csv.gz", ".parquet")
_BOMS = {codecs.BOM_UTF8: "utf-8-sig"}
_BOMS |= dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16")
_MISSING = (  # as in pandas
    "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|"
    "NaN|None|n/a|nan|null"
)
_COMMA = r"[+-]?\d*,\d+([eE][+-]?\d+)?"
_THOUSANDS = r"[+-]?[1-9]\d{0,2}[.,]\d{3}"
_DATE = r"(\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{4})([ T].*)?"
_FEW = 10  # different numbers that may stand for categories


@dataclass
class Column:
    """What a column was taken for, and what is wrong with it."""

    name: str
    kind: str = "category"  # or number, constant, date, id, label, left out
    different: int = 0
    missing: int = 0
    unreadable: int = 0
    examples: tuple[str, ...] = ()
    note: str = ""
    problem: str = ""


def read_cells(path: Path, id_column: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return a file's columns, of a CSV file as text, and how the file is written."""
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        known = ", ".join(SUFFIXES)
        raise TableError(f"'{path}' has an unknown format; save it as {known}")
    if not path.is_file():
        raise TableError(f"there is no file '{path}'; check the path")
    try:
        if name.endswith(".parquet"):
            frame = pd.read_parquet(path)
            frame = frame.reset_index() if frame.index.name == id_column else frame
            return frame.rename(columns=str), {"format": "Parquet"}
        raw = path.read_bytes()
        return _read_csv(gzip.decompress(raw) if name.endswith(".gz") else raw)
    except ImportError as error:
        remedy = "pip install 'flower-vfl[parquet]'"
        raise TableError(f"reading '{path}' needs pyarrow: {remedy}") from error
    except TableError as error:
        raise TableError(f"'{path}' {error}") from None
    except (OSError, ValueError, EOFError, csv.Error) as error:
        raise TableError(f"'{path}' cannot be read ({error}); check it") from error


def _read_csv(raw: bytes) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the cells of a CSV file as text, and how it is written."""
    text, encoding = _decode(raw)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise TableError(f"has a NUL byte in line {line}; export it again as UTF-8")

    def rows(delimiter: str) -> Any:
        return csv.reader(io.StringIO(text, ""), delimiter=delimiter)

    delimiter = max(",;\t|", key=lambda sign: len(next(filter(None, rows(sign)), ())))
    header: list[str] = []
    reader, uneven, count = rows(delimiter), [], 0
    for count, row in enumerate(reader, 1):  # noqa: B007
        header = header or [name.strip() for name in row]
        if row and (len(row) < len(header) or any(row[len(header) :])):
            uneven.append(f"line {reader.line_num} with {len(row)}")
    if not header:
        raise TableError("is empty; export it again")
    if uneven:
        lines = f"{len(uneven)} lines with another number of values"
        remedy = f"correct them, and put text that holds {delimiter!r} into quotes"
        found = f"has {len(header)} columns but {lines}, the first of them {uneven[0]}"
        raise TableError(f"{found}; {remedy}")
    settings: Any = {"dtype": str, "na_filter": False, "usecols": range(len(header))}
    frame = pd.read_csv(io.StringIO(text), sep=delimiter, index_col=False, **settings)
    frame = frame.set_axis(header, axis=1).apply(lambda column: column.str.strip())
    used = np.array(header, bool) | (frame != "").any().to_numpy()
    return frame.loc[:, used], {
        "format": "CSV",
        "encoding": encoding,
        "delimiter": delimiter,
        "decimal": ".",
        "line_ends": "CRLF" if "\r\n" in text else "LF" if "\n" in text else "CR",
        "quoted_line_breaks": reader.line_num - count,
    }


def _decode(raw: bytes) -> tuple[str, str]:
    # Latin-1 has control characters where Windows has letters.
    other = "cp1252" if re.search(rb"[\x80-\x9f]", raw) else "latin-1"
    marked = [name for mark, name in _BOMS.items() if raw.startswith(mark)]
    for encoding in marked or ["utf-8", other]:
        try:
            name = encoding.upper().replace("-SIG", " with BOM")
            return raw.decode(encoding), name
        except UnicodeDecodeError as error:
            problem = error
    raise problem


def take_columns(
    frame: pd.DataFrame, written: dict[str, Any], missing: Collection[str]
) -> tuple[pd.DataFrame, list[Column]]:
    """Return columns as numbers or text, and what each was taken for."""
    is_csv = "delimiter" in written
    frame = frame.mask(frame.isin({*(_MISSING.split("|") if is_csv else ()), *missing}))
    if is_csv and any(_decimal(frame[name].dropna()) == "," for name in frame):
        written["decimal"] = ","
    typed, found = {}, []
    for name in frame:
        column, about = frame[name], Column(str(name))
        try:
            column = _numbers(column, about, written) if is_csv else column
        except TableError as error:
            about.problem = str(error)
        about.missing = int(column.isna().sum())
        about.different = about.different or column.nunique()
        if pd.api.types.is_numeric_dtype(column.dtype):
            about.kind = "number"
        typed[name] = column
        found.append(about)
    return pd.DataFrame(typed, frame.index), found


def _numbers(
    column: pd.Series[Any], about: Column, written: dict[str, Any]
) -> pd.Series[Any]:
    """Return a column of text as numbers, or as it is if these are no numbers."""
    present, flags = column.dropna(), ("true", "false")
    if str(column.iloc[0]).lower() in flags and column.str.lower().isin(flags).all():
        return column.str.lower() == "true"
    decimal, text = _decimal(present), present
    if decimal == ",":
        text = text.mask(text.str.contains(".", regex=False)).str.replace(",", ".")
    numbers = pd.to_numeric(text, errors="coerce")
    wrong, right = present[numbers.isna()], numbers.nunique()
    share = f"{len(wrong)} of {len(present)} values"
    if len(wrong) and (len(wrong) * 2 >= len(present) or right <= _FEW):
        about.note = f"{share} are not numbers" if right else ""
        return column
    about.kind = "number"
    if len(wrong):
        about.unreadable, shown = len(wrong), wrong.drop_duplicates()[:3]
        about.examples = tuple(shown)
        rows = zip(shown, map(int, shown.index), strict=True)
        listed = ", ".join(f"'{value}' (row {row + 1})" for value, row in rows)
        remedy = f"take them as missing with --missing '{shown.iloc[0]}'"
        problem = f"{share} cannot be read as numbers: {listed}"
        raise TableError(f"{problem}; correct the file, or {remedy}")
    certain = written["delimiter" if decimal == "," else "decimal"] in (";", ".")
    signed = present[:0]
    if not certain:
        signed = present[present.str.contains(decimal, regex=False)]
    if len(signed) and signed.str.fullmatch(_THOUSANDS).all():
        value = str(signed.iloc[0])
        either = f"{value.replace(decimal, '')} or {value.replace(',', '.')}"
        raise TableError(f"'{value}' may be {either}; write it in one of these ways")
    if numbers.abs().max() > 2**53:  # floats do not tell these apart
        about.different = present.nunique()
    return numbers.reindex(column.index)


def _decimal(present: pd.Series[Any]) -> str:
    commas = present[present.str.contains(",", regex=False)]
    fit = commas.str.fullmatch(_COMMA).sum()
    dots = present.str.contains(".", regex=False).sum() if fit else 0
    return "," if fit > dots and 2 * fit > len(commas) else "."


def check_feature(column: pd.Series[Any], about: Column) -> None:
    """Refuse a column that training would lose."""
    present, drop = column.dropna(), f"leave it out with --drop '{about.name}'"
    if about.different <= 1:
        about.kind = "constant"
    elif about.kind == "number":
        values = present.to_numpy(np.float64)
        values = values[np.isfinite(values)]
        with np.errstate(all="ignore"):  # scaled as for training
            scaled = ((values - values.mean()) / values.std()).astype(np.float32)
        kept, infinite = pd.Series(scaled).nunique(), len(present) - len(values)
        if infinite:
            about.note = f"{infinite} infinite values are taken as missing"
        if 2 * kept < about.different - 1:
            lost = f"{about.different} different numbers, the largest {values.max():g}"
            lost += f", become {max(kept, 1)} when they are scaled to 32 bits"
            remedy = f"correct outliers, subtract a constant, or {drop}"
            raise TableError(f"{lost}; {remedy}")
    else:
        text = present.astype(str)
        once = int((~text.duplicated(False)).sum())
        example = f"such as '{text.iloc[0]}'"
        if text.str.fullmatch(_DATE).all():
            about.kind = "date"
            raise TableError(f"dates, {example}; turn them into numbers, or {drop}")
        if 2 * once > len(text):
            rare = f"{once} of {len(text)} values occur only once, {example}"
            remedy = f"nothing can be learned from it; correct it, or {drop}"
            raise TableError(f"it is text, of which {rare}: {remedy}")
