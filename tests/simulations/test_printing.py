"""Tables for people: they fit a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from study_cases import columns_of, evaluation_rows, leak_rows

from flower_vfl.simulations.cli.compare import screen_tables
from flower_vfl.simulations.cli.run import _leakage
from flower_vfl.simulations.printing import text_tables
from flower_vfl.simulations.results import tables
from flower_vfl.simulations.studies.run_metrics import leaks

ATTACKS = ["norm", "cosine", "mean:held_out=true", "median", "spectral", "stale:k=3"]
ATTACKS += ["direct", "passive"]


def _shown(*parts: object) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(*parts)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    return text


@pytest.mark.parametrize("attacks", range(1, len(ATTACKS) + 1))
def test_a_comparison_fits_80_columns(attacks: int) -> None:
    summary = {"mean": 0.123, "sd": 0.456, "min": 0.7, "max": 0.89}
    names = ["none", "passive-1=marvell:auc=0.65,over=run; *=iso:t=9", "gafm"]
    whole = {"beyond_model": summary, "run_auc_bound": summary}
    row = {**whole, "runs": 2, "utility": summary, "untrained": "", "time_ratio": 12.34}
    leaks = dict.fromkeys(ATTACKS[:attacks], summary)
    rows = [{**row, "defense": name, "leaks": leaks} for name in names]
    rows[-1]["untrained"] = "no better than a guess"
    document = {"metric": "test_top5_accuracy", "rows": rows}
    text = _shown(*screen_tables(document))
    assert text.count(" 0.123 ") >= 3 * (attacks + 3)  # no number is broken
    assert text.count("±0.456") == 3 * (attacks + 2) and text.count("0.700–0.890") == 3
    assert "(did not train)" in text and text.count("12.34×") == 3


def test_what_does_not_fit_is_in_a_second_table() -> None:
    rows = [["a" * 30, "x", *["0.1234"] * 12]]
    heads = ["name", "setting", *(f"number {n}" for n in range(12))]
    parts = list(text_tables(heads, rows, left=2))
    assert len(parts) == 3
    assert [part.columns[0].header for part in parts] == ["name"] * 3
    text = _shown(*parts)
    assert text.count("0.1234") == 12 and text.count("a" * 18) == 3


@pytest.mark.parametrize("columns", [30, 50])
def test_a_narrow_terminal_breaks_no_number(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    heads = ["name", *(f"number {n}" for n in range(12))]
    parts = list(text_tables(heads, [["marvell", *["0.1234"] * 12]]))
    console = Console(file=io.StringIO(), record=True)
    console.print(*parts)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= columns
    assert text.count("0.1234") == 12 and text.count("marvell") == len(parts)


def test_a_run_with_many_attacks_fits() -> None:

    found = dict.fromkeys(ATTACKS, 0.123)
    rows = leak_rows(found) + leak_rows(found, "passive-1+passive-2")
    document = {"records": columns_of(rows + evaluation_rows(auc=0.9))}
    text = _shown(*_leakage(leaks(tables({"": document}))))
    assert text.count("0.877") == 2 * len(ATTACKS)  # reversed, as everywhere
