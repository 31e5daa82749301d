"""What is published: metadata, files, and an installation without extras."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_cases import call

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"flower_vfl": "", "strategies": "strategies/", "simulations": "simulations/"}
NOT_SHIPPED = {".gitignore"}


def packaged(path: Path) -> str:
    """Return where a file of the clone is in the wheel."""
    first, *rest = path.parts
    return f"flower_vfl/{FOLDERS[first]}{'/'.join(rest)}"


def own_files() -> list[Path]:
    """Return the files of the packages, caches left out."""
    return [
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_every_file_of_the_packages_is_declared() -> None:
    declared = PROJECT["tool"]["setuptools"]
    data = {
        f"{package.replace('.', '/')}/{pattern}"
        for package, patterns in declared["package-data"].items()
        for pattern in patterns
    }
    packages = {package.replace(".", "/") for package in declared["packages"]}
    for path in own_files():
        place = Path(packaged(path))
        code = place.suffix == ".py" and str(place.parent) in packages
        assert code or any(place.match(pattern) for pattern in data), path


def test_versions_agree() -> None:
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    app = tomllib.loads((ROOT / "simulations/label_leakage/pyproject.toml").read_text())
    assert app["project"]["version"] == version
    template = ROOT / "simulations" / "templates" / "my-app" / "pyproject.toml"
    other = tomllib.loads(template.read_text())
    for part in (app, other):
        flwr = [text for text in PROJECT["project"]["dependencies"] if "flwr" in text]
        assert part["project"]["dependencies"] == flwr


def test_the_five_papers_can_be_cited() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    links = {each["url"] for each in cited if "url" in each}
    assert len(cited) == 5
    named = ["2102.08504", "2106.05508", "2302.02245", "2506.06742"]
    assert links == {f"https://arxiv.org/abs/{number}" for number in named}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_pages_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    for link in links:
        assert (ROOT / link.replace("\n", "")).exists(), link


def test_the_page_of_five_tasks_has_the_commands_that_are_measured() -> None:
    tasks = runpy.run_path(str(ROOT / "benchmarks" / "new_user.py"))["TASKS"]
    page = (ROOT / "docs" / "how-to" / "five-tasks.md").read_text()
    for task, commands in tasks.items():
        shown = "<br>".join(f"`{command}`" for command in commands)
        assert f"| {task} | {shown} |" in page


def test_compare_without_the_extra_of_the_report(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = "flower_vfl.simulations.report"
    for name in [name for name in sys.modules if name.startswith(f"{report}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "altair", None)
    words = ["compare", "--epochs", "1", "--seeds", "1", "--defense", "max-norm"]
    out = str(tmp_path / "study")
    code, shown, error = call(capsys, monkeypatch, *words, "--out", out)
    assert code == 0 and "max-norm" in shown and "report.html" not in shown
    hint = "a report needs altair: pip install 'flower-vfl[report]', then flower-vfl"
    assert f"flower-vfl: {hint} report {out}\n" in error
    code, shown, error = call(capsys, monkeypatch, "report", out)
    assert code == 2 and hint in error and shown == ""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    return folder


@pytest.mark.extra
@pytest.mark.slow
def test_the_wheel_has_every_file_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = {
        name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name
    }
    assert names == {packaged(path) for path in own_files()}
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    assert {str(path) for path in own_files()} <= set(inside)
    assert not [n for n in inside if re.search(r"\.pyc|__pycache__|\.venv|^runs/", n)]
    check = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.extra
@pytest.mark.slow
def test_the_wheel_works_outside_the_clone(built: Path, tmp_path: Path) -> None:
    """With the dependencies of this environment; new_user.py has one of its own."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    for command in (
        ["flower_vfl.simulations.cli.main", "new", "two-shops"],
        ["pytest", "-q", "two-shops"],
    ):
        start = (
            f"import runpy, sys; sys.path.insert(0, {str(tmp_path / 'installed')!r})"
        )
        start += f"; sys.argv = {command!r}"
        run = "; from flower_vfl.simulations.cli.main import main; main()"
        if command[0] == "pytest":
            run = "; import flower_vfl, pytest; print(flower_vfl.__file__)"
            run += "; sys.exit(pytest.main(sys.argv[1:]))"
        words = [sys.executable, "-c", start + run]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "installed") in done.stdout
