"""The functions that the architecture page walks through exist where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from docs_cases import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALKS = ("A training step, file by file", "A round of the alignment, file by file")
FILE = re.compile(r"^[\w/]+\.py$")
NAME = re.compile(r"^[A-Za-z_]\w*(\.\w+)?$")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def defined(path: Path) -> set[str]:
    """Return the functions, classes and methods of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


def named_functions(text: str) -> list[tuple[str, str]]:
    """Return each quoted function with the file that was named last before it."""
    found, file = [], ""
    for quoted in re.findall(r"`([^`]+)`", text):
        if FILE.match(quoted):
            file = quoted
        elif file and NAME.match(quoted) and not quoted.isupper():
            found.append((file, quoted))
    return found


@pytest.mark.parametrize("title", WALKS)
def test_files_and_functions_of_a_walk_exist(title: str) -> None:
    text = section(title)
    files = {quoted for quoted in re.findall(r"`([^`]+)`", text) if FILE.match(quoted)}
    assert len(files) >= 9
    everything = {name for file in files for name in defined(ROOT / file)}
    missing = [
        f"{name} (near {file})"
        for file, name in named_functions(text)
        if "." in name or name.startswith("_") or name.islower()
        if name not in defined(ROOT / file) and name not in everything
    ]
    assert not missing


def test_a_function_that_does_not_exist_is_found() -> None:
    text = "`strategies/training.py`: `Training.step`, `Training.leap`"
    names = [name for _, name in named_functions(text)]
    assert names == ["Training.step", "Training.leap"]
    assert "Training.step" in defined(ROOT / "strategies" / "training.py")
    assert "Training.leap" not in defined(ROOT / "strategies" / "training.py")


@pytest.mark.parametrize(
    ("package", "slow", "on_demand"),
    [
        ("flower_vfl", {"sklearn", "scipy", "pandas"}, {"canaries.py", "recording.py"}),
        ("strategies", {"sklearn", "scipy"}, set()),
        (
            "simulations",
            {"sklearn", "scipy"},
            {"app.py", "estimators.py", "figures.py"},
        ),
    ],
)
def test_processes_start_without_libraries_of_statistics(
    package: str, slow: set[str], on_demand: set[str]
) -> None:
    """They take a second or two to import, in every process that starts."""
    for path in sorted((ROOT / package).rglob("*.py")):
        imported = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
        allowed = path.name in on_demand or "templates" in path.parts
        assert allowed or not imported & slow, path
