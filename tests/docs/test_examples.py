"""The notebooks of examples/ run, and show what they print."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
import torch
from docs_cases import ROOT, same_output
from nbclient import NotebookClient

EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))
NEWS = Path(os.environ.get("FLOWER_VFL_DATA", ROOT / "../shared/data"))
NEEDS = {"text": NEWS / "ag_news_15k.csv.gz"}
LONG = ("images", "text")
Outputs = list[tuple[str, str]]  # kind and text


def runnable(path: Path) -> Any:
    needed = NEEDS.get(path.stem)
    if needed is not None and not needed.is_file():
        pytest.skip(f"{path.name} needs {needed.name}")
    return nbformat.read(path, as_version=4)


def shown(cell: Any) -> Outputs:
    """Return what a cell has stored, without progress bars."""
    found = []
    for output in cell.get("outputs", ()):
        if output["output_type"] == "stream" and output["name"] == "stdout":
            found.append(("print", output["text"]))
        elif output["output_type"] == "execute_result":
            found.append(("result", output["data"]["text/plain"]))
    return found


def run(cell: Any, space: dict[str, Any]) -> Outputs:
    """Run a cell in this process, as a notebook does."""
    tree = ast.parse(cell["source"])
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, found = io.StringIO(), []
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
            if value is not None:
                found = [("result", repr(value))]
    return ([("print", printed.getvalue())] if printed.getvalue() else []) + found


def same(stored: Outputs, got: Outputs, where: str) -> None:
    assert [kind for kind, _ in stored] == [kind for kind, _ in got], where
    for (_, before), (_, now) in zip(stored, got, strict=True):
        same_output(before, now)


LONG_ONES = [path for path in EXAMPLES if path.stem in LONG]  # `make test-all`
LENGTHS = [
    *(pytest.param(p, True, id=p.stem) for p in EXAMPLES if p.stem not in LONG),
    *(pytest.param(p, False, id=f"{p.stem}, short") for p in LONG_ONES),
    *(pytest.param(p, True, id=p.stem, marks=pytest.mark.extra) for p in LONG_ONES),
]


@pytest.mark.parametrize(("path", "whole"), LENGTHS)
def test_cells_run_and_print_what_is_stored(
    path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short: trainings last one epoch, and the numbers are not compared."""
    document = runnable(path)
    monkeypatch.chdir(ROOT / "examples")
    if path.stem in NEEDS:
        monkeypatch.setenv("FLOWER_VFL_DATA", str(NEEDS[path.stem].parent))
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        for number, cell in enumerate(document.cells):
            if cell["cell_type"] != "code":
                continue
            if not whole:
                cell["source"] = re.sub(r'"epochs": \d+', '"epochs": 1', cell["source"])
            got = run(cell, vars(module))
            if whole:
                same(shown(cell), got, f"{path.name}, {number}")
            else:
                assert [kind for kind, _ in shown(cell)] == [kind for kind, _ in got]
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


@pytest.mark.extra
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_kernel_runs_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two cores are shared with others
    document = runnable(path)
    stored = [shown(cell) for cell in document.cells]
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(document, timeout=120, resources=where).execute()
    for cell, before in zip(document.cells, stored, strict=True):
        same(before, shown(cell), path.name)
    results = [c for c in document.cells if "fit(" in c["source"] and shown(c)]
    kinds = {o["output_type"] for c in results for o in c["outputs"]}
    assert not results or "display_data" in kinds  # the progress bar
    for each in (o for c in document.cells for o in c.get("outputs", ())):
        assert each.get("name") != "stderr", each["text"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_they_are_small_say_what_they_show_and_name_no_machine(path: Path) -> None:
    text = path.read_text()
    first = json.loads(text)["cells"][0]
    assert len(text) < 20_000
    assert first["cell_type"] == "markdown" and first["source"][0].startswith("# ")
    assert not any(f"/{name}/" in text for name in ("work", "root", "home", "tmp"))
    assert [c for c in json.loads(text)["cells"] if c.get("outputs")]


def test_all_four_are_there() -> None:
    assert [path.stem for path in EXAMPLES] == ["audit", "images", "tabular", "text"]


def test_a_stale_output_is_found() -> None:
    cell = {"source": "x = 0.5\nprint(f'AUC {x}')\nx"}
    got = run(cell, {})
    same([("print", "AUC 0.5\n"), ("result", "0.5")], got, "")
    with pytest.raises(AssertionError):
        same([("print", "AUC 0.7\n"), ("result", "0.5")], got, "")
    with pytest.raises(AssertionError):
        same([("print", "AUC 0.5\n")], got, "")
