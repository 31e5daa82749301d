"""The page: one HTML file that needs nothing else, and its charts as pictures."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .charts import COLOURS, DARK, SERIES, theme, with_colours
from .data import Report
from .sections import Figure, Section, short_party

_TEMPLATES = Path(__file__).with_name("templates")
_PICTURE_WIDTH = 480


@cache
def script() -> str:
    """Return Vega, Vega-Lite and Vega-Embed, and the page's own script after them."""
    bundle = vl_convert.javascript_bundle(vl_version=_vega_lite())
    return f"{bundle}\n{(_TEMPLATES / 'report.js').read_text(encoding='utf-8')}"


def _vega_lite() -> str:
    """Return the version of Vega-Lite that Altair writes charts for."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def write_page(report: Report, sections: Sequence[Section], path: Path) -> None:
    """Write the page, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(render(report, sections), encoding="utf-8")
    part.replace(path)


def render(report: Report, sections: Sequence[Section]) -> str:
    """Return the page."""
    # Whatever a run folder holds, only this script may run and nothing is fetched.
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
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
    figures = [figure for section in sections for figure in section.figures]
    return environment.get_template("report.html").render(
        report=report,
        sections=sections,
        specs=[_spec(figure) for figure in figures],
        attacks=list(dict.fromkeys(f.attack for f in figures if f.attack)),
        parties=list(dict.fromkeys(f.party for f in figures if f.party)),
        families=report.settings.groupby("family", sort=False).groups,
        theme=theme(),
        colours=COLOURS,
        dark=DARK,
        script=Markup(script()),
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        digest=digest,
    )


def _spec(figure: Figure) -> dict[str, Any]:
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = figure.chart.to_dict(validate=False)
    spec.pop("config", None)
    return spec


def write_pictures(sections: Sequence[Section], folder: Path) -> None:
    """Write every chart as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    config = with_colours(theme(), COLOURS) | {"background": COLOURS["paper"]}
    used: set[str] = set()
    for figure in (figure for section in sections for figure in section.figures):
        name = re.sub(r"[^\w.@+-]+", "-", figure.name).strip("-.")[:100]
        name += f"-{len(used)}" if name in used else ""  # two coalitions of equal size
        used.add(name)
        spec = with_colours(_spec(figure), COLOURS) | {"width": _PICTURE_WIDTH}
        version = _vega_lite()
        svg = vl_convert.vegalite_to_svg(spec, vl_version=version, config=config)
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))
