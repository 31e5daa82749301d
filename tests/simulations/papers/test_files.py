"""The files of the papers' tables, their smoke runs, and the page of results."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from cli_cases import call

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.papers import show as reproduce_show
from flower_vfl.simulations.papers.experiments import (
    PAPERS,
    Experiment,
    Row,
    experiment_names,
    load_experiment,
)
from flower_vfl.simulations.papers.reproduce import cells_of, measured, run_experiment
from flower_vfl.simulations.papers.show import as_markdown
from flower_vfl.simulations.studies.trials import check_run

NAMES = experiment_names()
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# How many figures each table of a paper prints; a figure's are those in the text.
PRINTED = {
    "marvell-table-1": 6,
    "gafm-table-2": 4 * 4 * 6,
    "gafm-table-3": 4 * 2 * 2,
    "gafm-table-4": 3 * 4 * 5,
    "gafm-table-6": 4 * 3 * 5,
    "gafm-table-7": 4 * 2,
    "gafm-table-8": 4 * 5,
    "gafm-table-9": 4 * 5,
    "gafm-table-10": 4 * 2 * 5,
    "gafm-table-11": 3 * 6,
    "gafm-table-12": 0,  # several classes, which the paper does not have
    "gafm-original-table-1": 2 * 6 * 2,
    "gafm-original-table-2": 2 * 5 * 2,
    "gafm-original-table-3": 2 * (4 + 4 + 2),
    "florist-table-1": 7,
    "florist-table-2": 5,
    "florist-table-3": 9,
    "florist-table-5": 20,
    "florist-table-6": 7,
    "florist-table-7": 5,
    "florist-table-8": 9,
    "ladsg-table-4": 36,
    "ladsg-table-5": 36,
    "ladsg-table-6": 40,
    "ladsg-table-7": 36,
}
FIGURES = {
    "marvell-figure-3",
    "marvell-figure-4",
    "marvell-figure-10",
    "marvell-figure-11",
    "gafm-figure-2",
    "gafm-figure-3",
    *(f"gafm-original-figure-{number}" for number in range(2, 8)),
    "florist-figure-2",
    "florist-figure-3",
    "ladsg-figure-3",
    "ladsg-figure-4",
    "ladsg-figure-5",
    "ladsg-figure-6",
}


def test_every_table_and_figure_of_the_papers_is_there() -> None:
    assert set(NAMES) == PRINTED.keys() | FIGURES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_the_paper_has_a_cell(name: str) -> None:
    experiment = load_experiment(name)
    printed = [text for row in experiment.figures.values() for text in row if text]
    assert all(re.search(r"\d", text) for text in printed)
    if name in PRINTED:
        assert len(printed) == PRINTED[name]
    else:  # a diagram
        assert "No values were read off" in experiment.about["scaled"]
        assert experiment.claims
    assert experiment.minutes > 0
    assert all(experiment.about.values())


@pytest.mark.extra  # smoke runs have nearly the same names
@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_names_in_the_settings_mean_something(name: str, data_folder: Path) -> None:
    experiment = load_experiment(name)
    seen = set()
    for row in experiment.rows:
        if row.config is not None and row.config not in seen:
            seen.add(row.config)
            check_run(replace(row.config, limit=row.config.limit or 2000))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all tables: one takes the runs over that another has made."""
    return tmp_path_factory.mktemp("smoke")


@cache
def with_every_label() -> dict[str, Experiment]:
    """Return the tables with so many rows that a paper's methods, data ... are run.

    Every table has one row at least; what another table of the paper has is not run
    again with every method, nor a method with each of its numbers. `make test-all`
    does both.
    """
    found: dict[str, Experiment] = {}
    seen: set[tuple[str, str]] = set()
    for name in NAMES:
        experiment = load_experiment(name, quick=True)
        paper, kept = experiment.about["paper"], list[Row]()
        for row in experiment.rows:
            labels = {(paper, NUMBER.sub("", label)) for label in row.labels}
            if row.config is None:
                kept.append(row)
            elif labels - seen or all(each.config is None for each in kept):
                kept.append(row)
                seen |= labels
        # Some columns compare a row with that of a baseline.
        besides = {column.beside for column in experiment.columns if column.beside}
        near = {label for row in kept for label in row.labels}
        rows = [
            row
            for row in experiment.rows
            if row in kept
            or (besides & {*row.labels} and {*row.labels} <= near | besides)
        ]
        found[name] = replace(experiment, rows=rows)
    return found


@pytest.mark.long
@pytest.mark.data
@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.extra)], ids=["some", "whole"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_run_fills_every_cell(
    name: str, whole: bool, smoke: Path, data_folder: Path
) -> None:
    experiment = (
        load_experiment(name, quick=True) if whole else with_every_label()[name]
    )
    study = run_experiment(experiment, smoke / name, quick=True, bar=False)
    assert study.errors == {}
    assert "smoke run" in study.title and study.extra["quick"]
    frame = measured(experiment, study)
    cells = cells_of(experiment, frame)
    read = [column.reading for column in experiment.shown]
    for row in experiment.rows:
        for reading, cell in zip(read, cells[row.labels], strict=True):
            optional = reading in ("epoch", "nothing")  # e.g. vanilla has no GAN part
            assert cell.values or row.missing or optional, (row.name, cell.column.name)
            assert all(map(math.isfinite, cell.values))
    text = as_markdown(experiment, frame, quick=True)
    assert reproduce_show.SMOKE.capitalize() in text
    assert f"flower-vfl reproduce {name} --quick" in text


def test_an_unknown_table_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gafm-table-2"):
        load_experiment("gafm-table-22")


def test_the_list_names_every_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(capsys, monkeypatch, "reproduce", "--list", "--json")
    entries = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in entries] == NAMES
    assert all(entry["runs"] and entry["minutes"] for entry in entries)
    code, out, _ = call(capsys, monkeypatch, "reproduce", "--list")
    assert code == 0 and "hours in all" in out
    code, _, err = call(capsys, monkeypatch, "reproduce")
    assert code == 2 and "which table" in err


@pytest.fixture(scope="module")
def page() -> str:
    return reproduce_show.results_page()


def test_the_page_in_docs_is_the_one_that_would_be_written(page: str) -> None:
    written = PAPERS.parents[1] / "docs" / "results.md"
    assert written.read_text(encoding="utf-8") == page


def test_the_overview_counts_what_the_tables_say(page: str) -> None:
    head, *tables = page.split("### ")
    known, _, overview = head.partition("## Overview")
    *rows, total = [line for line in overview.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(tables) == len(experiment_names())
    sums = [0] * 9
    for row, table in zip(rows, tables, strict=True):
        title, run, *counts = (cell.strip() for cell in row.strip("|").split("|"))
        assert table.startswith(title)
        if run == "not run yet":
            assert "Not run yet." in table
            continue
        sums = [a + int(b) for a, b in zip(sums, counts, strict=True)]
        _, figures, alike, reasons, unexplained, open_, *claims = map(int, counts)
        differing = [x for x in table.splitlines() if x.startswith("- Differs")]
        listed = sum(line.partition(". ")[0].count("; ") + 1 for line in differing)
        assert listed == reasons + unexplained
        assert figures == alike + listed + open_
        assert (unexplained > 0) == ("**unexplained**" in table)
        own = [line for line in known.splitlines() if line.startswith(f"| {title} |")]
        words = ("held", "missed", "undecided")
        assert claims == [sum(x.endswith(f"| {w} |") for x in own) for w in words]
    assert [int(cell) for cell in total.strip("|").split("|")[2:]] == sums


def test_one_to_three_claims_of_every_paper_are_headlines() -> None:
    experiments = [load_experiment(name) for name in NAMES]
    count = Counter(
        each.about["paper"] for each in experiments for c in each.claims if c.headline
    )
    assert count.keys() == {each.about["paper"] for each in experiments}
    assert set(count.values()) <= {1, 2, 3}


def test_shared_files_are_toml() -> None:
    for path in (PAPERS / "shared").glob("*.toml"):
        assert tomllib.loads(path.read_text(encoding="utf-8"))["paper"]
