"""The page: one HTML file that needs nothing else, and its charts as pictures."""

from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

import vl_convert
from altair.utils.schemapi import debug_mode
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flower_vfl.simulations import capture
from flower_vfl.simulations.results import write_whole

from . import charts, figures, tables
from .charts import COLOURS, DARK, SERIES, TEMPLATES, Figure, theme, with_colours
from .data import Report, short_party
from .matrix import matrix_sections, ranked_data
from .paper import slug

Section = tuple[list[Figure], list[tables.Table]]

_PICTURE_WIDTH = 480


@cache
def script() -> str:
    """Return the page's script, with Vega, Vega-Lite and Vega-Embed in it."""
    own = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    return vl_convert.javascript_bundle(own, charts.VEGA_LITE)


@debug_mode(False)  # Altair checks every part of a chart; a test does so once
def contents(report: Report) -> dict[str, Section]:
    """Return figures and tables of each section, in the order of the page."""
    if report.cells is not None:
        settings = tables.settings_tables(report)
        return {**matrix_sections(report.cells), "settings": ([], settings)}
    found: dict[str, Section] = {"summary": ([], [tables.summary_table(report)])}
    if report.study is not None and "paper" in report.study.extra:
        found["paper"] = [], [tables.paper_table(report.study)]
    if report.kind != "scale":
        drawn = figures.tradeoff_figures(report)
        points = figures.setting_points(report)
        found["tradeoff"] = drawn, [tables.area_table(points)] if drawn else []
    if report.varied is not None:
        found["varied"] = figures.varied_figures(report), []
    return found | {
        "leak": (figures.leak_figures(report), []),
        "privacy": (figures.privacy_figures(report), [tables.privacy_table(report)]),
        "utility": (figures.utility_figures(report), []),
        "gradients": (figures.row_figures(report, capture.GRADIENT), []),
        "embeddings": (figures.row_figures(report, capture.EMBEDDING), []),
        "calibration": figures.calibrations(report),
        "cost": (figures.cost_figures(report), []),
        "settings": ([], tables.settings_tables(report)),
    }


def write_page(report: Report, sections: Mapping[str, Section], path: Path) -> None:
    """Write the page, whole or not at all."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    places = {name: place for place, name in enumerate(report.look.names)}
    environment.filters |= {
        "short_party": short_party,
        "numbers": lambda names: " ".join(str(places[name]) for name in names),
        "colour": lambda name: SERIES[report.look.colours[places[name]] % len(SERIES)],
    }
    drawn = [figure for own, _ in sections.values() for figure in own]
    page = environment.get_template("report.html").render(
        report=report,
        sections=sections,
        charts=[charts.specification(figure.chart) for figure in drawn],
        attacks=list(dict.fromkeys(f.attack for f in drawn if f.attack)),
        parties=list(dict.fromkeys(f.party for f in drawn if f.party)),
        families=report.settings.groupby("family", sort=False).groups,
        ranked={} if report.cells is None else ranked_data(report.cells),
        theme=theme(),
        colours=COLOURS,
        dark=DARK,
        script=Markup(script()),
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        # Whatever a run folder holds, only this script may run and nothing is fetched.
        digest=b64encode(sha256(script().encode()).digest()).decode(),
    )
    write_whole(path, page.encode())


def write_pictures(sections: Mapping[str, Section], folder: Path) -> None:
    """Write every chart as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    config = with_colours(theme(), COLOURS) | {"background": COLOURS["paper"]}
    used: set[str] = set()
    for figure in (figure for own, _ in sections.values() for figure in own):
        name = slug(figure.name)
        name += f"-{len(used)}" if name in used else ""  # two coalitions of equal size
        used.add(name)
        spec = with_colours(charts.specification(figure.chart), COLOURS)
        svg = charts.svg(spec | {"width": _PICTURE_WIDTH}, config)
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))
