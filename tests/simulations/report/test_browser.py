"""The report in a real browser: charts, filters, sorting, pointer, keys, print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser_page

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.report import write_report
from flower_vfl.simulations.studies.study import Trial, run_study

DEFENSES = ("none", "marvell:s=1", "marvell:s=4", "iso:t=1")
# Everything drawn of a chart lies inside it; text may be cut off by nothing else.
OUTSIDE = """
[...document.querySelectorAll("figure svg")].flatMap((svg) => {
  const box = svg.viewBox.baseVal;
  return [...svg.querySelectorAll("polyline, path, rect, text")].filter((node) => {
    const own = node.getBBox();
    const turned = node.hasAttribute("transform");
    const [w, h] = turned ? [own.height, own.width] : [own.width, own.height];
    const x = turned ? own.x + own.width / 2 - w / 2 : own.x;
    const y = turned ? own.y + own.height / 2 - h / 2 : own.y;
    return !(x >= -1 && y >= -1 && x + w <= box.width + 1 && y + h <= box.height + 1);
  }).map((node) => `${svg.getAttribute("aria-label")}: ${node.outerHTML.slice(0, 99)}`);
})
"""
CHARTS = """
[...document.querySelectorAll("figure")].map((figure) => {
  const svg = figure.querySelector("svg");
  const data = [...svg.querySelectorAll(".line, .mark, .points")];
  const size = svg.getBoundingClientRect();
  const drawn = data.filter((node) => node.getBoundingClientRect().width
    + node.getBoundingClientRect().height > 0).length;
  return [svg.getAttribute("aria-label"), drawn, data.length, size.width, size.height];
})
"""
# Numbers of groups of which anything can be seen.
VISIBLE = """
[...new Set([...document.querySelectorAll("main [data-series]")]
  .filter((node) => node.getClientRects().length > 0)
  .flatMap((node) => node.dataset.series.split(" ")))].sort().join(" ")
"""


def box(kind: str, value: str) -> str:
    return f'input[data-kind="{kind}"][data-value="{value}"]'


def count(page: Page, selector: str) -> int:
    query = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return int(page.run(f"{query}.filter(n => n.getClientRects().length).length"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = RunConfig(
        epochs=2, batch_size=64, width=4, attack="norm,mean", reproducible_noise=True
    )
    trials = [
        Trial(
            {"defense": defense, "seed": "0"},
            replace(base, defense=defense, capture=40),
        )
        for defense in DEFENSES
    ]
    folder = tmp_path_factory.mktemp("study")
    run_study(folder, "compare", "four defenses", trials, bar=False)
    return write_report(folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page() as page:
        yield page


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    browser.open(report)
    yield browser
    assert browser.problems == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_is_drawn_inside_its_frame(
    page: Page, report: Path, width: int, dark: bool
) -> None:
    page.open(report, width, dark)
    charts: list[list[Any]] = page.run(CHARTS)
    assert len(charts) == 25
    for name, drawn, data, wide, high in charts:
        assert drawn == data > 0, name
        assert wide > 200 and high > 100, name
    assert page.run(OUTSIDE) == []
    # no sideways scrolling of the page itself
    assert page.run("document.documentElement.scrollWidth") <= width
    ink = page.run("getComputedStyle(document.body).backgroundColor")
    assert ink == ("rgb(25, 25, 25)" if dark else "rgb(255, 255, 255)")


def test_a_defense_is_hidden_everywhere(page: Page) -> None:
    assert page.run(VISIBLE) == "0 1 2 3"
    page.click(box("series", "3"))
    assert page.run(VISIBLE) == "0 1 2"
    shown = page.run("document.querySelector('main').innerText")
    assert "iso" not in shown.split("SETTINGS AND VERSIONS")[0].split("Settings and")[0]
    page.click(box("family", "1 2"))
    assert page.run(VISIBLE) == "0"
    assert page.run(f"document.querySelector('{box('series', '1')}').checked") is False
    page.click(box("series", "2"))
    assert page.run(f"document.querySelector('{box('family', '1 2')}').indeterminate")
    assert "2" in page.run(VISIBLE).split()
    page.click("#all")
    assert page.run(VISIBLE) == "0 1 2 3"


def test_attacks_and_parties_can_be_hidden(page: Page) -> None:
    assert count(page, "#leak figure") == 4
    page.click(box("attack", "norm"))
    assert count(page, "#leak figure") == 2
    page.click(box("party", "passive-2"))
    assert count(page, "#leak figure") == 1
    assert count(page, "#gradients figure") == 4


def test_the_table_can_be_sorted(page: Page) -> None:
    column = page.run(
        "[...document.querySelectorAll('#summary thead button')]"
        ".findIndex(b => b.textContent === 'leak mean')"
    )
    cells = (
        "[...document.querySelectorAll('#summary tbody tr')]"
        f".map(row => Number(row.cells[{column}].dataset.value))"
    )
    before = page.run(cells)
    button = f"#summary thead th:nth-child({column + 1}) button"
    page.click(button)
    assert page.run(cells) == sorted(before)
    page.click(button)
    assert page.run(cells) == sorted(before, reverse=True)
    head = f"document.querySelector('{button}').parentElement.ariaSort"
    assert page.run(head) == "descending"


def test_the_pointer_shows_values(page: Page) -> None:
    at = page.run(
        "(() => { const m = document.querySelector('#tradeoff .mark');"
        "m.scrollIntoView({block: 'center'}); const r = m.getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2, m.dataset.tip]; })()"
    )
    page.move(at[0] + 2, at[1] + 2)
    assert page.run("document.getElementById('tip').hidden") is False
    assert page.run("document.getElementById('tip').textContent") == at[2]
    page.move(2, 2)
    assert page.run("document.getElementById('tip').hidden") is True


def test_keys_reach_everything(page: Page) -> None:
    page.run("document.querySelector('#leak svg').focus()")
    page.press("ArrowRight")
    first = page.run("document.getElementById('tip').textContent")
    assert first.startswith("no defense: step ") and "leak AUC" in first
    page.press("ArrowRight")
    assert page.run("document.getElementById('tip').textContent") != first
    page.press("Escape")
    assert page.run("document.getElementById('tip').hidden") is True
    page.run(f"document.querySelector('{box('series', '3')}').focus()")
    page.press(" ")
    assert "3" not in page.run(VISIBLE).split()
    unreachable = page.run(
        "[...document.querySelectorAll('figure svg, .scroll, button, input, a')]"
        ".filter(n => n.tabIndex < 0).length"
    )
    assert unreachable == 0


def test_values_that_lines_tell_are_those_of_the_runs(page: Page, report: Path) -> None:
    runs = report.parent / "runs"
    document = json.loads(next(runs.glob("defense-none*/result.json")).read_text())
    series = document["series"]["leak_norm/passive-1"]
    page.run("document.querySelector('#leak svg').focus()")
    page.press("Home")
    told = page.run("document.getElementById('tip').textContent")
    assert page.run("document.querySelector('#leak figcaption').textContent") == (
        "norm attack on passive-1"
    )
    # 16 steps: a point for every 1.6 of them, the first two in the first
    value = sum(series["values"][:2]) / 2
    assert float(told.rsplit(" ", 1)[1]) == pytest.approx(value, abs=0.003)


def test_print(page: Page, tmp_path: Path) -> None:
    page.pdf(tmp_path / "report.pdf")
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and len(printed) > 20_000
    page.call("Emulation.setEmulatedMedia", media="print")
    assert count(page, "#filters input") == 0
    assert count(page, "#filters label.series") == len(DEFENSES)  # the legend
    assert count(page, "figure") == 25
    page.call("Emulation.setEmulatedMedia", media="")
