"""The report in a real browser: charts, legends, filters, pointer, keys, print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from report_cases import BASE, DEFENSES

from flower_vfl.simulations.report import write_report
from flower_vfl.simulations.results import table
from flower_vfl.simulations.studies.study import Trial, run_study

# Marks of data that can be seen, by chart; and the size of the chart.
CHARTS = """
[...document.querySelectorAll("figure")].map((figure) => {
  const data = [...figure.querySelectorAll(".role-mark path, .role-mark line")];
  const drawn = data.filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width + box.height > 0 && node.getAttribute("opacity") !== "0";
  });
  const size = figure.querySelector("svg").getBoundingClientRect();
  return [figure.innerText, drawn.length, size.width, size.height];
})
"""
# Names beside points that lie on each other.
MEETING = """
(() => {
  const boxes = [...document.querySelectorAll("#tradeoff .role-mark.mark-text text")]
    .filter((node) => node.textContent).map((node) => node.getBoundingClientRect());
  return boxes.flatMap((a, n) => boxes.slice(n + 1).filter((b) => a.left < b.right
    && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)).length;
})()
"""
# Sections whose heading lies under the bar, or far below it, when their link is used.
COVERED = """
[...document.querySelectorAll("nav a")].filter((link) => {
  link.click();
  const heading = document.querySelector(`${link.hash} h2`).getBoundingClientRect();
  const bar = document.getElementById("filters").getBoundingClientRect();
  const last = scrollY + innerHeight > document.documentElement.scrollHeight - 2;
  const far = heading.top > bar.bottom + 60 && !last;
  return bar.top !== 0 || heading.top < bar.bottom - 1 || far;
}).map((link) => link.hash)
"""
# Settings of which a point or a row can be seen.
VISIBLE = """
[...new Set([
  ...[...document.querySelectorAll("#summary tbody tr, #gradients figure")]
    .filter((node) => node.getClientRects().length > 0)
    .map((node) => SETTINGS[node.dataset.settings]),
  ...[...document.querySelectorAll(".role-mark [aria-label*='setting: ']")]
    .map((node) => /setting: ([^;]*)/.exec(node.getAttribute("aria-label"))[1]),
])].sort().join(" ")
""".replace("SETTINGS", json.dumps([d.replace("none", "no defense") for d in DEFENSES]))
EVERYTHING = "iso:t=1 marvell:s=1 marvell:s=4 no defense"
LEGEND = ".role-legend-label text"


def checked(page: Page, kind: str, value: str) -> bool:
    return bool(page.run(f"document.querySelector('{box(kind, value)}').checked"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trials = [
        Trial({"defense": defense, "seed": "0"}, replace(BASE, defense=defense))
        for defense in DEFENSES
    ]
    folder = tmp_path_factory.mktemp("study")
    run_study(folder, "compare", "four defenses", trials, bar=False)
    return write_report(folder)


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    """The report; it is drawn once, and what a test has hidden is shown again."""
    if not browser.run(f"document.body.dataset.kept === {json.dumps(str(report))}"):
        draw(browser, report)
        browser.run(f"document.body.dataset.kept = {json.dumps(str(report))}")
    yield browser
    browser.run("document.getElementById('all').click()")
    browser.wait(f"({VISIBLE}) === {json.dumps(EVERYTHING)}")
    assert browser.problems == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_chart_has_marks(
    browser: Page, report: Path, width: int, dark: bool
) -> None:
    draw(browser, report, width, dark)
    charts: list[list[Any]] = browser.run(CHARTS)
    assert len(charts) == 26
    for name, drawn, wide, high in charts:
        assert drawn > 0, name
        assert 200 < wide <= width and high > 100, name
    assert browser.run(OUTSIDE) == []
    assert browser.run(OVERLAPPING) == []
    assert browser.run(MEETING) == 0
    named = browser.run(
        "document.querySelectorAll('#tradeoff .role-mark.mark-text text').length"
    )
    assert named == len(DEFENSES)
    assert browser.run(COVERED) == []
    if width == 1280:  # the summary does not scroll sideways
        box = "document.querySelector('#summary .scroll')"
        assert browser.run(f"{box}.scrollWidth <= {box}.clientWidth")
    else:  # the bar, which is the legend of all charts, is one line
        assert browser.run("document.getElementById('filters').offsetHeight") < 60
    # no sideways scrolling of the page itself
    assert browser.run("document.documentElement.scrollWidth") <= width
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(25, 25, 25)" if dark else "rgb(255, 255, 255)")
    line = browser.run(
        "getComputedStyle(document.querySelector('#utility .mark-line path')).stroke"
    )
    assert line == ("rgb(236, 236, 236)" if dark else "rgb(26, 26, 26)")
    assert browser.problems == []


def test_the_pointer_shows_values(page: Page, report: Path) -> None:
    runs = report.parent / "runs"
    document = json.loads(next(runs.glob("defense-none*/result.json")).read_text())
    records = table(document).query("attack == 'norm' and party == 'passive-1'")
    values = records.query("metric == 'leak'").sort_values("step")["value"]
    mark = '#leak .role-mark [aria-label*="setting: no defense"]'
    page.move(*middle(page, mark))
    page.wait(f"{TOLD} !== ''")
    told = page.run(
        "Object.fromEntries([...document.querySelectorAll('#vg-tooltip-element tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent)))"
    )
    # 16 steps: a point for every 1.6 of them, the first two in the first
    assert told["setting"] == "no defense" and told["step"] == "1.5"
    assert float(told["leak AUC"]) == pytest.approx(values[:2].mean(), abs=1e-4)
    ring = f"document.querySelector({json.dumps(mark)}).getAttribute('opacity')"
    page.wait(f"{ring} !== '0'")
    page.move(2, 2)
    page.wait(f"{TOLD} === ''")


def test_the_wheel_zooms_with_shift_only(page: Page) -> None:
    ticks = (
        "[...document.querySelector('#utility .role-axis-label')"
        ".querySelectorAll('text')].map(node => node.textContent).join()"
    )
    x, y = middle(page, "#utility svg")
    before, place = page.run(ticks), page.run("scrollY")
    page.scroll(x, y, 120, shift=False)
    page.wait(f"scrollY > {place}")
    assert page.run(ticks) == before
    page.move(*middle(page, "#utility svg"))
    page.scroll(*middle(page, "#utility svg"), -400, shift=True)
    page.wait(f"{ticks} !== {json.dumps(before)}")


def test_a_legend_hides_a_series_everywhere(page: Page) -> None:
    assert page.run(VISIBLE) == EVERYTHING
    assert count(page, "#utility .mark-line path") == 4
    page.click(f"#utility {LEGEND}")
    page.wait("document.querySelectorAll('#utility .mark-line path').length === 3")
    page.wait(f"({VISIBLE}) === 'iso:t=1 marvell:s=1 marvell:s=4'")
    assert not checked(page, "setting", "0")
    dimmed = "[...document.querySelectorAll('#leak figure:first-child LEGEND')]"
    dimmed += ".filter(node => Number(node.getAttribute('opacity') ?? 1) < 1)"
    dimmed += ".map(node => node.textContent).join()"
    assert page.run(dimmed.replace("LEGEND", LEGEND)) == "no defense"
    page.click(f"#leak {LEGEND}")
    page.wait(f"({VISIBLE}).includes('no defense')")
    assert checked(page, "setting", "0")
    assert count(page, "#utility .mark-line path") == 4


def test_a_legend_hides_a_class_in_its_chart(page: Page) -> None:
    marks = "#gradients figure:first-child .role-mark path"
    before = count(page, marks)
    page.click(f"#gradients figure:first-child {LEGEND}")
    found = f"document.querySelectorAll('{marks}').length"
    page.wait(f"0 < {found} && {found} < {before}")


def test_a_defense_is_hidden_everywhere(page: Page) -> None:
    page.click(box("setting", "3"))
    page.wait(f"({VISIBLE}) === 'marvell:s=1 marvell:s=4 no defense'")
    assert count(page, "#cost .mark-rect path") == 2 * 3
    page.click(box("family", "1 2"))
    page.wait(f"({VISIBLE}) === 'no defense'")
    assert not checked(page, "setting", "1")
    page.click(box("setting", "2"))
    page.wait(f"({VISIBLE}) === 'marvell:s=4 no defense'")
    assert page.run(f"document.querySelector('{box('family', '1 2')}').indeterminate")
    page.click("#all")
    page.wait(f"({VISIBLE}).split(' ').length === 5")  # 'no defense' is two words


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


def test_keys_reach_everything(page: Page) -> None:
    told = "document.querySelector('#leak output').textContent"
    page.run("document.querySelector('#leak figure').focus()")
    page.press("ArrowRight")
    first = page.run(told)
    assert "setting: no defense" in first and "leak AUC: " in first
    page.press("ArrowRight")
    assert page.run(told) not in ("", first)
    page.press("Home")
    assert page.run(told) == first
    page.press("Escape")
    assert page.run(told) == ""
    page.run(f"document.querySelector('{box('setting', '3')}').focus()")
    page.press(" ")
    page.wait(f"!({VISIBLE}).includes('iso')")
    unreachable = page.run(
        "[...document.querySelectorAll('figure, .scroll, button, input, a')]"
        ".filter(n => n.tabIndex < 0).length"
    )
    assert unreachable == 0


def test_print(page: Page, tmp_path: Path) -> None:
    page.pdf(tmp_path / "report.pdf")
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and len(printed) > 20_000
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    paper = page.run("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"  # ink is saved on a dark screen too
    assert count(page, "#filters") == 0
    assert count(page, "figure") == 26
    page.call("Emulation.setEmulatedMedia", media="")
