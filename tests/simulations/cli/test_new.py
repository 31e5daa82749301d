"""``flower-vfl new``, and the rules of Flower's hub for it and for our own app."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from cli_cases import call
from flwr.app import Context, RecordDict
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from flower_vfl.simulations.cli import main as cli

OURS = Path(cli.__file__).parents[1] / "label_leakage"


@pytest.fixture
def app(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    monkeypatch.chdir(tmp_path)
    words = ["new", "Two-shops", "--publisher", "acme"]
    code, shown, error = call(capsys, monkeypatch, *words)
    assert code == 0, error
    assert shown == "wrote Two-shops; next: see Two-shops/README.md\n"
    return tmp_path / "Two-shops"


def test_every_name_is_the_apps(app: Path) -> None:
    files = [path for path in app.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(app)) for path in files) == [
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "tests/test_app.py",
        "two_shops/__init__.py",
        "two_shops/client_app.py",
        "two_shops/server_app.py",
        "two_shops/task.py",
    ]
    for path in files:
        assert not re.search("my.app|your-name", path.read_text())
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["name"] == "Two-shops"
    assert project["tool"]["flwr"]["app"]["publisher"] == "acme"


@pytest.mark.parametrize("whose", ["new", "ours"])
def test_the_rules_of_the_hub(whose: str, request: pytest.FixtureRequest) -> None:
    folder = OURS if whose == "ours" else request.getfixturevalue("app")
    config, warnings = load_and_validate(folder / "pyproject.toml", check_module=False)
    assert warnings == []
    assert config["tool"]["flwr"]["app"]["fab-format-version"] == 1
    assert "SuperNodes" in (folder / "README.md").read_text()
    _validate_files(_collect_file_paths(folder))
    bundle = build_fab_from_disk(folder)  # checks what version 1 asks for
    names = set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.parametrize("whose", ["new", "ours"])
def test_flwr_run_installs_nothing(
    whose: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = OURS if whose == "ours" else request.getfixturevalue("app")
    (tmp_path / "pyproject.toml").write_text((folder / "pyproject.toml").read_text())
    command = [sys.executable, "-m", "uv", "sync", "--offline", "--dry-run"]
    command += ["--no-install-project", "--python", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Resolved 1 package" in done.stderr and " + " not in done.stderr


def test_the_apps_own_test_passes(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(app), str(app / "tests"), *sys.path])
    try:
        importlib.import_module("test_app").test_the_app_trains()
    finally:
        for name in [*sys.modules]:
            if name == "test_app" or name.split(".")[0] == "two_shops":
                del sys.modules[name]


def test_a_deployed_party_reads_its_own_file(
    app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(app), *sys.path])
    Path("bank.csv").write_text("id,label\n7,no\n3,yes\n5,no\n")
    Path("shop.csv").write_text("id,spent\n5,1\n7,3\n3,2\n")
    try:
        task = importlib.import_module("two_shops.task")
        label, shop = (
            Context(0, 0, {"data": file}, RecordDict(), {})
            for file in ("bank.csv", "shop.csv")
        )
        labels, ids = task.load_labels(label)
        assert labels.tolist() == [1, 0, 0] and ids.tolist() == [3, 5, 7]
        features, ids = task.load_features(shop)
        assert features.flatten().tolist() == pytest.approx([0, -(1.5**0.5), 1.5**0.5])
        assert ids.tolist() == [3, 5, 7]
    finally:
        for name in [name for name in sys.modules if name.startswith("two_shops")]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("9lives", "'9lives' cannot be the name of a Flower app"),
        ("a" * 33, "at most 32 characters"),
        ("a/b", "letters, digits and hyphens"),
        ("Torch", "Python has a module 'torch' already"),
        ("class", "Python has a module 'class' already"),
        ("Two-shops", "'Two-shops' exists already"),
    ],
)
def test_names_that_cannot_be(
    name: str,
    message: str,
    app: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, error = call(capsys, monkeypatch, "new", name)
    assert code == 2 and message in error


@pytest.mark.flower
@pytest.mark.extra
def test_flwr_run_trains_the_app(app: Path) -> None:
    from flower_vfl.simulations.runtime.flower_runtime import run_app

    lines: list[str] = []
    run_app(app, run_config={"epochs": 2}, nodes=3, on_line=lines.append, timeout=300)
    assert any("test_auc" in line for line in lines), lines
