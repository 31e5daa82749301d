"""A report, and its pictures, as files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .along import setting_section
from .calibration import calibration_section
from .content import Section
from .curves import cost_section, leak_section, utility_section
from .page import render
from .paper import paper_section
from .pictures import embedding_section, gradient_section
from .plots import with_legend
from .raster import write_png
from .runs import Report, load_report
from .tables import settings_section, summary_section
from .tradeoff import tradeoff_section

REPORT_FILE, PICTURES_FOLDER = "report.html", "pictures"


def write_report(folder: Path, pictures: bool = False) -> Path:
    """Write ``report.html`` into a folder and return its path.

    The file holds everything that it shows and asks no network for anything.
    """
    report = load_report(folder)
    sections = _sections(report)
    path = folder / REPORT_FILE
    part = path.with_name(f".{REPORT_FILE}.{os.getpid()}")
    part.write_text(render(report, sections), encoding="utf-8")
    part.replace(path)
    if pictures:
        _write_pictures(sections, folder / PICTURES_FOLDER)
    return path


def _sections(report: Report) -> list[Section]:
    sections = [
        summary_section(report),
        paper_section(report.extra),
        tradeoff_section(report),
        setting_section(report),
        leak_section(report),
        utility_section(report),
        gradient_section(report),
        embedding_section(report),
        calibration_section(report),
        cost_section(report),
        settings_section(report),
    ]
    return [section for section in sections if section is not None]


def _write_pictures(sections: list[Section], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    used: set[str] = set()
    for figure in (figure for section in sections for figure in section.figures):
        scene = with_legend(figure.scene, figure.legend)
        name = re.sub(r"[^\w.@+-]+", "-", figure.name).strip("-.")[:100]
        if name in used:  # such as two coalitions of equal size
            name += f"-{len(used)}"
        used.add(name)
        drawn = f"{scene.svg(standalone=True)}\n"
        (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")
        write_png(scene, folder / f"{name}.png")
