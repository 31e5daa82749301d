"""The page of a matrix in a real browser: heat maps, ranking, the reader's weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import (
    OUTSIDE,
    OVERLAPPING,
    TOLD,
    Page,
    box,
    count,
    draw,
    middle,
)
from report_cases import matrix_cells, matrix_report

from flower_vfl.simulations.report.matrix import short_attacks
from flower_vfl.simulations.report.page import contents, write_page
from flower_vfl.simulations.studies.matrix import ranking

BEST = """
Object.fromEntries([...document.querySelectorAll("#best tbody tr")]
  .map(row => [row.dataset.party, [...row.cells].slice(1).map(c => c.textContent)]))
"""
COLUMN = """
[...document.querySelectorAll("#ranking thead button")]
  .findIndex(button => button.textContent === "NAME")
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = matrix_report(matrix_cells())
    path = tmp_path_factory.mktemp("matrix") / "report.html"
    write_page(found, contents(found), path)
    return path


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    draw(browser, report)
    yield browser
    assert browser.problems == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_it_fits_the_screen(
    browser: Page, report: Path, width: int, dark: bool
) -> None:
    draw(browser, report, width, dark)
    assert browser.run(OUTSIDE) == [] and browser.run(OVERLAPPING) == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert count(browser, "#matrix figure") == 3
    # 6 methods on a, 5 on b, 6 over all; and 3 attacks on each of them
    assert count(browser, "#matrix .role-mark.mark-rect path") == 17 + 3 * 6 + 3 * 5
    assert browser.problems == []


def test_a_cell_shows_its_values(page: Page) -> None:
    cells = matrix_cells()
    own = cells.query("dataset == 'a' and method == 'iso' and attack == 'similarity'")
    mark = '#matrix figure:nth-child(2) path[aria-label*="setting: iso;"]'
    mark += '[aria-label*="attack: similarity;"]'
    page.move(*middle(page, mark))
    page.wait(f"{TOLD} !== ''")
    assert f"{own['leak'].mean():.4g}" in page.run(TOLD)
    assert "iso:x=1" in page.run(TOLD)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_weight_ranks_as_python_does(page: Page, beta: float) -> None:
    page.run(
        f"(() => {{ const s = document.getElementById('beta'); s.value = {beta};"
        "s.dispatchEvent(new Event('input')); })()"
    )
    found = ranking(matrix_cells(), beta)
    for dataset, shown in page.run(BEST).items():
        good = found[(found["dataset"] == dataset) & (found["untrained"] == "")]
        good = good[good["method"] != "none"][:3]
        wanted = [f"{r.method} ({r.dcs:.3f})" for r in good.itertuples()]
        assert shown == wanted, dataset
    rank, dcs = (page.run(COLUMN.replace("NAME", name)) for name in ("rank", "DCS"))
    rows = page.run(
        "[...document.querySelectorAll('#ranking tbody tr')].map(row => "
        f"[row.cells[1].textContent, row.cells[0].textContent.split('\\n')[0],"
        f"row.cells[{rank}].textContent, row.cells[{dcs}].textContent])"
    )
    wanted = {
        (r.dataset, r.method): (str(r.rank), f"{r.dcs:.3f}") for r in found.itertuples()
    }
    assert {(row[0], row[1]): (row[2], row[3]) for row in rows} == wanted
    mid = found.query("dataset == 'a' and method == 'mid'")["dcs"].iloc[0]
    label = f"dataset: a; setting: mid; DCS: {round(mid, 4):g}"
    shown = json.dumps(f'[aria-label="{label}"]')
    page.wait(f"document.querySelector({shown}) !== null")


def test_the_ranking_can_be_sorted_and_filtered(page: Page) -> None:
    column = page.run(COLUMN.replace("NAME", "utility"))
    page.click(f"#ranking thead th:nth-child({column + 1}) button")
    values = page.run(
        "[...document.querySelectorAll('#ranking tbody tr')]"
        f".map(row => Number(row.cells[{column}].dataset.value))"
    )
    assert values == sorted(values) and len(values) == 17
    page.click(box("setting", "0"))
    page.wait(
        "document.querySelectorAll('#matrix .role-mark.mark-rect path').length === 41"
    )
    assert count(page, "#ranking tbody tr") == 14
    page.click(box("party", "b"))
    assert count(page, "#ranking tbody tr") == 10 and count(page, "#best tbody tr") == 2
    assert count(page, "#matrix figure") == 2


def test_short_names_of_attacks() -> None:
    several = ["norm", "mean:held_out=true", "similarity", "similarity:known=false"]
    assert list(short_attacks(several).values()) == ["norm", "mean", *several[2:]]
