"""Tables as others export them: what is recognised, and the line of each refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flower_vfl.errors import TableError
from flower_vfl.simulations.datasets import read_party_file
from flower_vfl.simulations.datasets.party_files import PartyFile

NUMBERS = [str(number * 1.5) for number in range(200)]
DROP = "leave it out with --drop 'x'"
SCALED = (
    f"when they are scaled to 32 bits; correct outliers, subtract a constant, or {DROP}"
)


def column(values: list[object], delimiter: str = ",", quote: str = "") -> str:
    """Return a file with ids and one column."""
    lines = [f"{i}{delimiter}{quote}{value}{quote}" for i, value in enumerate(values)]
    return "\n".join([f"id{delimiter}x", *lines, ""])


def changed(value: str) -> list[str]:
    return [*NUMBERS[:50], value, *NUMBERS[51:]]


def labels(values: list[object]) -> str:
    lines = [f"{i},{i},{value}" for i, value in enumerate(values)]
    return "\n".join(["id,x,y", *lines])


def read(folder: Path, content: str | bytes, **arguments: object) -> PartyFile:
    file = folder / "bank.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_party_file(file, "id", **arguments)  # type: ignore[arg-type]


REFUSED = {
    "a word among numbers": (
        column(changed("n/k")),
        ", column 'x': 1 of 200 values cannot be read as numbers: 'n/k' (row 51); "
        "correct the file, or take them as missing with --missing 'n/k'",
    ),
    "two decimal signs": (
        column(changed("2,5"), ";"),
        ", column 'x': 1 of 200 values cannot be read as numbers: '2,5' (row 51); "
        "correct the file, or take them as missing with --missing '2,5'",
    ),
    "near 10^30": (
        column([10**30 + number for number in range(200)]),
        f", column 'x': 200 different numbers, the largest 1e+30, become 1 {SCALED}",
    ),
    "near 2^63": (
        column([2**63 - 1 - number for number in range(200)]),
        ", column 'x': 200 different numbers, the largest 9.22337e+18, become 1 "
        + SCALED,
    ),
    "above 2^63": (
        column([2**63 + 100 - number for number in range(200)]),
        ", column 'x': 200 different numbers, the largest 9.22337e+18, become 1 "
        + SCALED,
    ),
    "an infinite scale": (
        column(changed("1e300")),
        f", column 'x': 200 different numbers, the largest 1e+300, become 1 {SCALED}",
    ),
    "one sentinel": (
        column(changed("99999999999999")),
        f", column 'x': 200 different numbers, the largest 1e+14, become 2 {SCALED}",
    ),
    "thousands or decimals": (
        column([f"{number},125" for number in range(1, 200)], quote='"'),
        ", column 'x': '1,125' may be 1125 or 1.125; write it in one of these ways",
    ),
    "points among commas": (
        "id;x;y\n" + "".join(f"{i};{i}.125;{i},5\n" for i in range(1, 50)),
        ", column 'x': '1.125' may be 1125 or 1.125; write it in one of these ways",
    ),
    "points and commas": (
        column([f"{number}.100,5" for number in range(1, 50)], ";"),
        ", column 'x': it is text, of which 49 of 49 values occur only once, such as "
        f"'1.100,5': nothing can be learned from it; correct it, or {DROP}",
    ),
    "names": (
        column([f"name {number}" for number in range(9)]),
        ", column 'x': it is text, of which 9 of 9 values occur only once, such as "
        f"'name 0': nothing can be learned from it; correct it, or {DROP}",
    ),
    "dates": (
        column([f"2024-01-{number % 9 + 10}" for number in range(90)]),
        ", column 'x': dates, such as '2024-01-10'; turn them into numbers, or " + DROP,
    ),
    "two problems": (
        "id,x,y\n" + "".join(f"{i},name {i},word {i}\n" for i in range(9)),
        ", column 'x': it is text, of which 9 of 9 values occur only once, such as "
        f"'name 0': nothing can be learned from it; correct it, or {DROP} "
        "(2 such columns: flower-vfl inspect)",
    ),
    "a NUL byte": (
        column(changed("1\0")),
        " has a NUL byte in line 52; export it again as UTF-8",
    ),
    "UTF-16 without a mark": (
        column(NUMBERS).encode("utf-16-le"),
        " has a NUL byte in line 1; export it again as UTF-8",
    ),
    "short rows": (
        "id,x,y\n1,2,3\n2,3\n3\n",
        " has 3 columns but 2 lines with another number of values, the first of them "
        "line 3 with 2; correct them, and put text that holds ',' into quotes",
    ),
    "a long row": (
        "id;x\n1;2\n2;3;4\n",
        " has 2 columns but 1 lines with another number of values, the first of them "
        "line 3 with 3; correct them, and put text that holds ';' into quotes",
    ),
    "a header twice": ("id,x,x\n1,2,3\n", " has two columns called 'x'; rename one"),
    "an empty name": (
        ",id,x\n0,1,2\n",
        " has a column without a name; name it, or save the file without its index",
    ),
    "an empty file": ("\n\n", " is empty; export it again"),
    "an open quote": (
        'id,x\n1,2\n2,"3',
        " cannot be read (Error tokenizing data. C error: EOF inside string starting "
        "at row 2); check it",
    ),
}


@pytest.mark.parametrize(("content", "line"), REFUSED.values(), ids=REFUSED)
def test_a_table_that_is_refused(
    content: str | bytes, line: str, tmp_path: Path
) -> None:
    with pytest.raises(TableError) as caught:
        read(tmp_path, content)
    assert str(caught.value) == f"'{tmp_path / 'bank.csv'}'{line}"


ASKED = "add --task multiclass for classes, --task regression for amounts"
LABELS = {
    "infinite": (labels([0.5, 1.5, "inf"]), "some labels are infinite; correct them"),
    "one": (labels([1, 1]), "every label is '1'; training needs two or more"),
    "missing": (
        labels([1, "", 0, ""]),
        "2 rows without a label; remove them or fill them in",
    ),
    "grades": (
        labels([number % 18 for number in range(200)]),
        f"200 labels have 18 different values: {ASKED}",
    ),
    "as many classes as rows": (
        labels([f"c{number}" for number in range(200)]),
        f"200 labels have 200 different values: {ASKED}",
    ),
    "a word": (
        labels([*range(99), "n/k"]),
        "1 of 100 values cannot be read as numbers: 'n/k' (row 100); correct the file, "
        "or take them as missing with --missing 'n/k'",
    ),
}


@pytest.mark.parametrize(("content", "line"), LABELS.values(), ids=LABELS)
def test_labels_that_are_refused(content: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(TableError) as caught:
        read(tmp_path, content, label_column="y")
    assert str(caught.value) == f"'{tmp_path / 'bank.csv'}', column 'y': {line}"


def test_the_id_is_no_label(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"'id' of .*bank.csv' cannot be both id and"):
        read(tmp_path, column(NUMBERS), label_column="id")


def test_many_values_with_a_task(tmp_path: Path) -> None:
    grades = labels([number % 18 for number in range(200)])
    for task in ("multiclass", "regression"):
        rows = read(tmp_path, grades, label_column="y", task=task)
        assert rows.columns[-1].note == task


COMMAS = [number.replace(".", ",") for number in NUMBERS]
RECOGNISED = {
    "semicolon": (column(NUMBERS, ";"), {"delimiter": ";"}),
    "tab": (column(NUMBERS, "\t"), {"delimiter": "\t"}),
    "bar": (column(NUMBERS, "|"), {"delimiter": "|"}),
    "decimal commas": (column(COMMAS, ";"), {"delimiter": ";", "decimal": ","}),
    "quoted commas": (column(COMMAS, quote='"'), {"delimiter": ",", "decimal": ","}),
    "UTF-8 with BOM": (
        column(NUMBERS).encode("utf-8-sig"),
        {"encoding": "UTF-8 with BOM"},
    ),
    "UTF-16": (column(NUMBERS).encode("utf-16"), {"encoding": "UTF-16"}),
    "UTF-16, big end first": (
        b"\xfe\xff" + column(NUMBERS).encode("utf-16-be"),
        {"encoding": "UTF-16"},
    ),
    "CRLF": (column(NUMBERS).replace("\n", "\r\n"), {"line_ends": "CRLF"}),
    "CR": (column(NUMBERS).replace("\n", "\r"), {"line_ends": "CR"}),
    "a delimiter at each end": (column(NUMBERS).replace("\n", ",\n"), {}),
    "blank lines": ("\n\n" + column(NUMBERS) + "\n", {}),
    "blanks": (column(NUMBERS).replace(",", " , "), {}),
}


@pytest.mark.parametrize(("content", "written"), RECOGNISED.values(), ids=RECOGNISED)
def test_a_table_that_is_recognised(
    content: str | bytes, written: dict[str, str], tmp_path: Path
) -> None:
    rows = read(tmp_path, content)
    expected = {
        "encoding": "UTF-8",
        "delimiter": ",",
        "decimal": ".",
        "line_ends": "LF",
    }
    expected |= {"format": "CSV", **written}
    assert rows.written == expected | {"quoted_line_breaks": 0}
    assert rows.features["x"].tolist() == [float(number) for number in NUMBERS]
    assert [(c.name, c.kind) for c in rows.columns] == [("id", "id"), ("x", "number")]


@pytest.mark.parametrize(
    ("encoding", "name"), [("latin-1", "LATIN-1"), ("cp1252", "CP1252")]
)
def test_letters_of_older_encodings(encoding: str, name: str, tmp_path: Path) -> None:
    place = "Köln" if encoding == "latin-1" else "Köln €"
    rows = read(tmp_path, f"id,größe,ort\n1,5,{place}\n2,6,{place}".encode(encoding))
    assert rows.written["encoding"] == name
    assert rows.features.columns.tolist() == ["größe", "ort"]
    assert set(rows.features["ort"]) == {place}


def test_quoted_line_breaks_are_counted(tmp_path: Path) -> None:
    rows = read(tmp_path, column(["a\nb", "c"] * 9, quote='"'))
    assert rows.written["quoted_line_breaks"] == 9
    assert set(rows.features["x"]) == {"a\nb", "c"}


def test_what_each_column_is_taken_for(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "id": [f"{number:04d}" for number in range(40)],
            "number": [*range(39), np.inf],
            "gaps": [None, *range(39)],
            "code": ["1", "2", "X", "2"] * 10,
            "flag": [True, False] * 20,
            "one": 7,
            "none": None,
            "copy": [*range(39), np.inf],
            "note": "free text",
            "y": ["good", "bad"] * 20,
        }
    )
    file = tmp_path / "bank.csv"
    frame.to_csv(file, index=False)
    rows = read_party_file(file, "id", "y", drop=["note", "y"])
    found = {c.name: (c.kind, c.different, c.missing, c.note) for c in rows.columns}
    infinite = "1 infinite values are taken as missing"
    assert found == {
        "id": ("id", 40, 0, ""),
        "note": ("left out", 0, 0, ""),
        "number": ("number", 40, 0, infinite),
        "gaps": ("number", 39, 1, ""),
        "code": ("category", 3, 0, "10 of 40 values are not numbers"),
        "flag": ("number", 2, 0, ""),
        "one": ("constant", 1, 0, ""),
        "none": ("constant", 0, 40, ""),
        "copy": ("number", 40, 0, "the same values as 'number'"),
        "y": ("label", 2, 0, "binary"),
    }
    assert rows.ids[7] == "0007" and rows.features["flag"].dtype == bool


def test_missing_values_have_names(tmp_path: Path) -> None:
    rows = read(tmp_path, column(changed("n/k")), missing=["n/k"])
    assert rows.features["x"].isna().sum() == 1 and rows.columns[1].missing == 1
    assert read(tmp_path, column(changed("NULL"))).columns[1].missing == 1


def test_ids_in_different_ways_are_noted(tmp_path: Path) -> None:
    about = read(tmp_path, "id,x\n007,1\n12,2\n").columns[0]
    assert about.note == "written in different ways, such as '007'"
    assert read(tmp_path, "id,x\n007,1\n012,2\n").columns[0].note == ""


def test_problems_are_only_noted_if_asked(tmp_path: Path) -> None:
    rows = read(tmp_path, column(changed("n/k")), check="none")
    about = rows.columns[1]
    assert (about.kind, about.unreadable, about.examples) == ("number", 1, ("n/k",))
    assert about.problem.startswith("1 of 200 values")
    assert read(tmp_path, column(changed("n/k")), check="id").ids.tolist()[-1] == 199
    with pytest.raises(TableError, match=r"column 'id': 1 rows that repeat"):
        read(tmp_path, "id,x\n1,2\n1,3\n", check="id")
    assert read(tmp_path, "id,x\n1,2\n1,3\n", check="none").columns[0].problem


def test_dates_of_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "bank.parquet"
    days = pd.to_datetime(["2024-01-10"] * 5 + ["2024-01-11"] * 5)
    pd.DataFrame({"id": range(10), "day": days}).to_parquet(file)
    with pytest.raises(TableError, match=r"'day': dates, such as '2024-01-10"):
        read_party_file(file, "id")
