"""Five tasks of a new user who has nothing but the wheel: their commands and seconds.

Builds the wheel from the last commit, installs it into a new virtual environment
outside the clone, first alone and then with the extras ``sim`` and ``report``, and runs
everything in a folder of its own. Prints the table of ``docs/how-to/five-tasks.md``.
Packages come from the index that pip is configured for. The files of the papers'
datasets are no part of the wheel: ``reproduce`` takes them from ``FLOWER_VFL_DATA``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODES = "num-supernodes={} client-resources-num-cpus=1"
STREAM = "--stream --federation-config '{}'"
PYPROJECT = """\
[project]
name = "clinics"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "somebody"

[tool.flwr.app.components]
serverapp = "clinics:app"
clientapp = "clinics:client_app"
"""
FILES = """
from sklearn.datasets import load_breast_cancer
table = load_breast_cancer(as_frame=True).frame.rename_axis("id").reset_index()
bank = table[["id", "target", "mean radius", "mean texture"]]
bank.sample(frac=1).to_csv("bank.csv", index=False)
shop = table.drop(columns=["target", "mean radius", "mean texture"])
shop.sample(frac=1).to_csv("shop.csv", index=False)
"""
TASKS: dict[str, tuple[str, ...]] = {
    "train on your own CSV files": (
        "flower-vfl init bank.csv shop.csv --label target",
        "flower-vfl run --config data.toml --out runs/own",
    ),
    "audit them": ("flower-vfl run --config data.toml --attack norm,cosine,mean",),
    "choose a defense for leak AUC ≤ 0.65": (
        "flower-vfl compare --config data.toml --target-leak 0.65 --out runs/chosen",
    ),
    "put it into an existing Flower app": (
        "flwr run clinics " + STREAM.format(NODES.format(2)),
    ),
    "deploy with TLS": ("python -m flower_vfl.simulations.deployment",),
}
ALONE = ("flower-vfl compare --epochs 5 --seeds 1 --out runs/alone",)
OTHERS = (
    "flower-vfl compare --epochs 5 --seeds 1 --out runs/demo",
    "flower-vfl report runs/demo --pictures",
    "flower-vfl new two-shops",
    "flwr run two-shops " + STREAM.format(NODES.format(3)),
    "flower-vfl reproduce gafm-original-table-3 --quick",
)


class Environment:
    """A new virtual environment, and an empty folder in which commands run."""

    def __init__(self, folder: Path) -> None:
        self.scripts, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir(parents=True)
        venv.create(folder / "venv", with_pip=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        kept.pop("VIRTUAL_ENV", None)
        self.variables = {
            **kept,
            "PATH": f"{self.scripts}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "COLUMNS": "80",
        }
        files = ROOT.parent / "shared" / "data"
        if files.is_dir():
            self.variables.setdefault("FLOWER_VFL_DATA", str(files))

    def install(self, *what: str) -> float:
        """Install packages and return the seconds that it took."""
        pip = ["python", "-m", "pip", "install", "-q", "-c", f"{ROOT}/constraints.txt"]
        return self.run([*pip, *what])[0]

    def run(self, words: Sequence[str]) -> tuple[float, str]:
        """Run a command and return its seconds and what it printed."""
        begin = time.monotonic()
        done = subprocess.run(
            words,
            cwd=self.work,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode or "Traceback" in done.stdout or "ERROR" in done.stdout:
            print(done.stdout)
            sys.exit(f"failed with {done.returncode}: {shlex.join(words)}")
        return time.monotonic() - begin, done.stdout

    def stop(self) -> None:
        """End the SuperLink that `flwr run` leaves behind for the next run."""
        home = self.variables["FLWR_HOME"].encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if b"FLWR_HOME=" + home + b"\0" in entry.read_bytes():
                    os.kill(int(entry.parent.name), 15)
            except OSError:
                continue  # it has ended, or is not ours


def build(folder: Path) -> Path:
    """Return a wheel of the last commit, built from its sdist."""
    archive = folder / "source.tar"
    subprocess.run(["git", "-C", ROOT, "archive", "-o", archive, "HEAD"], check=True)
    source = folder / "source"
    source.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", source], check=True)
    words = [sys.executable, "-m", "build", "--no-isolation", "-o", folder, source]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def existing_app(folder: Path) -> None:
    """Write the app of docs/existing-deployments.md, with its defense."""
    page = (ROOT / "docs" / "existing-deployments.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    clients = blocks[3].split("def leak_auc")[0] + "client_app = clients\n"
    folder.mkdir()
    (folder / "clinics.py").write_text("\n".join([blocks[0], blocks[2], clients]))
    (folder / "pyproject.toml").write_text(PYPROJECT)


def table(seconds: Mapping[str, float]) -> str:
    lines = ["| task | commands | seconds |", "|---|---|---:|"]
    for task, commands in TASKS.items():
        shown = "<br>".join(f"`{command}`" for command in commands)
        lines.append(f"| {task} | {shown} | {seconds[task]:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="a folder that does not exist yet")
    folder = parser.parse_args().keep or Path(tempfile.mkdtemp(prefix="vfl-"))
    folder.mkdir(exist_ok=True)
    folder = folder.resolve()
    wheel = build(folder)
    user = Environment(folder)
    print(f"install the wheel alone: {user.install(str(wheel)):.0f} s", flush=True)
    for command in ALONE:
        spent, printed = user.run(shlex.split(command))
        assert "flower-vfl[report]" in printed and "marvell" in printed
        print(f"{command}: {spent:.0f} s, says how to get a report", flush=True)
    spent = user.install(f"{wheel}[sim,report]")
    print(f"install the extras sim and report: {spent:.0f} s", flush=True)
    user.run(["python", "-c", FILES])
    existing_app(user.work / "clinics")
    seconds: dict[str, float] = {}
    try:
        for command in OTHERS:
            spent, printed = user.run(shlex.split(command))
            last = printed.strip().splitlines()[-1]
            print(f"{command}: {spent:.0f} s: {last}", flush=True)
        for task, commands in TASKS.items():
            spent_each = [user.run(shlex.split(command))[0] for command in commands]
            seconds[task] = sum(spent_each)
            print(f"{task}: {seconds[task]:.0f} s", flush=True)
    finally:
        user.stop()
    print(f"\n{table(seconds)}")


if __name__ == "__main__":
    main()
