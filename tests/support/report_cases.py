"""The study that reports are made of, and a reader of their pages."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.report.data import Report
from flower_vfl.simulations.results import tables

BASE = RunConfig(
    epochs=2,
    batch_size=64,
    width=4,
    attack="norm,mean",
    capture=40,
    reproducible_noise=True,
)
DEFENSES = ("none", "marvell:s=1", "marvell:s=4", "iso:t=1")
METHODS = ("none", "iso", "marvell", "gafm", "coae", "mid")


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


def matrix_cells() -> pd.DataFrame:
    """Return two datasets, six methods and three attacks; one method lacks in b."""
    draw = np.random.default_rng(0)
    rows = []
    for dataset, method, seed in product("ab", METHODS, range(2)):
        if (dataset, method) == ("b", "gafm"):
            continue
        plain = 0.9 if method == "none" else float(draw.uniform(0.5, 0.9))
        failed = "no better than a guess" if method == "coae" else ""
        for attack in ("norm", "similarity", "similarity:known=false"):
            leak = 1.0 if method == "none" else float(draw.uniform(0.45, 1.0))
            known = (dataset, method, f"{method}:x=1", attack, seed, leak)
            rows.append((*known, plain, 0.9, failed))
    names = ["dataset", "method", "setting", "attack", "seed", "leak"]
    return pd.DataFrame(rows, columns=[*names, "utility", "utility_none", "untrained"])


def matrix_report(cells: pd.DataFrame) -> Report:
    runs = cells.drop_duplicates(["dataset", "method", "seed"])
    runs = runs.assign(setting=runs["method"], family=runs["method"])
    document = {"config": {"epochs": 8}, "versions": {"torch": "2"}, "engine": "ray"}
    given = "a matrix", "matrix", runs, tables({}), {"a": document}, {}, {}, None
    return Report(*given, cells)
