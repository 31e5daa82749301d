"""One HTML file about a study or a run, and its charts as pictures."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flower_vfl.errors import ConfigError

__all__ = ["PICTURES_FOLDER", "REPORT_FILE", "write_figures", "write_report"]

REPORT_FILE, PICTURES_FOLDER = "report.html", "pictures"


def write_report(folder: Path, pictures: bool = False) -> Path:
    """Write ``report.html`` into the folder of a study or a run and return its path.

    The file holds everything that it shows and fetches nothing from the network. With
    `pictures` every chart is also written as SVG and PNG, into the folder ``pictures``.
    """
    with _extra(folder):
        from .data import load_report
        from .page import contents, write_page, write_pictures

    report = load_report(folder)
    sections = contents(report)
    write_page(report, sections, folder / REPORT_FILE)
    if pictures:
        write_pictures(sections, folder / PICTURES_FOLDER)
    return folder / REPORT_FILE


def write_figures(folder: Path, target: Path) -> list[Path]:
    """Write the figures of a study or a run for a paper: PNG, SVG and data as CSV."""
    with _extra(folder):
        from .data import load_report
        from .paper import write_plots

    return write_plots(load_report(folder), target)


@contextmanager
def _extra(folder: Path) -> Iterator[None]:
    """Name the extra that is missing; its libraries take time to load."""
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = f"pip install 'flower-vfl[report]', then flower-vfl report {folder}"
        raise ConfigError(f"a report needs {error.name}: {remedy}") from error
