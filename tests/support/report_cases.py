"""The study that reports are made of, and a reader of their pages."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from flower_vfl.simulations.config import RunConfig

BASE = RunConfig(
    epochs=2,
    batch_size=64,
    width=4,
    attack="norm,mean",
    capture=40,
    reproducible_noise=True,
)
DEFENSES = ("none", "marvell:s=1", "marvell:s=4", "iso:t=1")


class Reader(HTMLParser):
    """Collects the elements of a page and the text of its tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


def read(path: Path) -> tuple[str, Reader]:
    page = path.read_text(encoding="utf-8")
    return page, Reader(page)
