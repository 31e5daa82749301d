"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from .content import Figure, Legend, Section, Table
from .curves import short_party
from .markup import Markup, element
from .runs import Group, Report
from .scene import COLOURS, Line, Marks, Scene, Style, listed

# On a dark screen; the first is the ink itself.
_DARK = {
    "ink": "#ececec",
    "soft": "#a8a8a8",
    "grid": "#3a3a3a",
    "paper": "#191919",
    "s0": "#ececec",
    "s1": "#4aa3df",
    "s2": "#ff8433",
    "s3": "#1fc795",
}


def render(report: Report, sections: Sequence[Section]) -> str:
    """Return the page."""
    script = Markup(_asset("report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Whatever a run folder holds, only this script may run and nothing is fetched.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", report.title),
        element("style", _colours(), Markup(_asset("report.css"))),
    )
    body = element(
        "body",
        _header(report, sections),
        _filters(report, sections),
        element("main", *(_section(section) for section in sections)),
        element("div", id="tip", role="status", hidden=True),
        element("script", script),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _colours() -> Markup:
    light = "".join(f"--{name}: {value};" for name, value in COLOURS.items())
    dark = "".join(f"--{name}: {value};" for name, value in _DARK.items())
    return Markup(
        f":root {{{light}}}\n"
        f"@media screen and (prefers-color-scheme: dark) {{:root {{{dark}}}}}\n"
    )


def _header(report: Report, sections: Sequence[Section]) -> Markup:
    runs = len(report.runs)
    facts = f"{report.kind}: {runs} run{'s' if runs != 1 else ''}"
    if len(report.groups) > 1:
        facts += f" of {len(report.groups)} settings"
    links = [
        element("a", section.title, href=f"#{section.key}")
        for section in sections
        if not section.missing
    ]
    lost = [element("li", f"{name}: {why}") for name, why in report.unfinished.items()]
    return element(
        "header",
        element("h1", report.title),
        element("p", facts, class_="facts"),
        element("p", "Not finished, and not shown:") if lost else "",
        element("ul", *lost, class_="lost") if lost else "",
        element("nav", *links, aria_label="Sections"),
    )


def _filters(report: Report, sections: Sequence[Section]) -> Markup:
    """Return what hides groups, attacks and parties everywhere; also the legend."""
    figures = [figure for section in sections for figure in section.figures]
    families: dict[str, list[Group]] = {}
    for group in report.groups:
        families.setdefault(group.family, []).append(group)
    boxes = [_family(name, groups) for name, groups in families.items()]
    parts = [_fieldset("Defenses", boxes)]
    for title, kind, names in (
        ("Attacks", "attack", dict.fromkeys(f.attack for f in figures if f.attack)),
        ("Parties", "party", dict.fromkeys(f.party for f in figures if f.party)),
    ):
        if len(names) > 1:
            boxes = [_box(kind, name, short_party(name)) for name in names]
            parts.append(_fieldset(title, boxes))
    button = element("button", "Show all", type="button", id="all")
    return element("form", *parts, button, id="filters", aria_label="Show or hide")


def _fieldset(title: str, boxes: Sequence[Markup]) -> Markup:
    return element("fieldset", element("legend", title), *boxes)


def _family(name: str, groups: Sequence[Group]) -> Markup:
    own = [_box("series", str(g.number), g.name, g.style) for g in groups]
    if len(groups) == 1:
        return own[0]
    numbers = " ".join(str(group.number) for group in groups)
    whole = _box("family", numbers, name)
    return element("span", whole, *own, class_="family", role="group", aria_label=name)


def _box(kind: str, value: str, name: str, style: Style | None = None) -> Markup:
    box = element(
        "input", type="checkbox", checked=True, data_kind=kind, data_value=value
    )
    swatch = "" if style is None else _swatch(style)
    return element("label", box, swatch, element("span", name), class_=kind)


def _swatch(style: Style, line: bool = True) -> Markup:
    scene = Scene("", 34, 14)
    if line:
        scene.items.append(Line(((1, 7), (33, 7)), style, 2.0))
    scene.items.append(Marks(((17, 7),), style, 4.5))
    return scene.swatch()


def _section(section: Section) -> Markup:
    parts = [element("h2", section.title)]
    if section.missing:
        parts.append(element("p", section.missing, class_="missing"))
    if section.text:
        parts.append(element("p", section.text))
    if section.legend:
        parts.append(_legend(section.legend))
    tables = [_table(table) for table in section.tables]
    if section.figures:
        drawn = [_figure(figure) for figure in section.figures]
        kind = "charts small" if section.small else "charts"
        parts.append(element("div", *drawn, *tables, class_=kind))
    else:
        parts += tables
    return element("section", *parts, id=section.key)


def _legend(legend: Legend) -> Markup:
    entries = [
        element("li", _swatch(style, line=False), name) for name, style in legend
    ]
    return element("ul", *entries, class_="classes")


def _figure(figure: Figure) -> Markup:
    return element(
        "figure",
        figure.scene.svg(),
        element("figcaption", figure.caption),
        data_series=listed(figure.series),
        data_attack=figure.attack or None,
        data_party=figure.party or None,
    )


def _table(table: Table) -> Markup:
    heads = []
    for place, name in enumerate(table.heads):
        if table.sortable:
            inner = element("button", name, type="button", data_column=place)
            heads.append(element("th", inner, scope="col", aria_sort="none"))
        else:
            heads.append(element("th", name, scope="col"))
    rows = []
    for number, row in enumerate(table.rows):
        series = listed(table.series[number]) if table.series else None
        cells = [element("th", row[0].text, scope="row")]
        for cell in row[1:]:
            value = None if cell.value is None else f"{cell.value:.10g}"
            kind = "number" if cell.value is not None else None
            cells.append(element("td", cell.text, class_=kind, data_value=value))
        rows.append(element("tr", *cells, data_series=series))
    whole = element(
        "table",
        "" if table.folded else element("caption", table.caption),
        element("thead", element("tr", *heads)),
        element("tbody", *rows),
        class_="sortable" if table.sortable else None,
    )
    label = f"{table.caption}, scrolls sideways"
    box = element(
        "div", whole, class_="scroll", tabindex=0, role="region", aria_label=label
    )
    if table.folded:
        return element("details", element("summary", table.caption), box)
    return box
