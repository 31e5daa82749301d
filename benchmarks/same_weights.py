"""Whether two versions of the code train the same weights.

    python benchmarks/same_weights.py --write before.json   # with the old version
    python benchmarks/same_weights.py --compare before.json # with the new version

Runs twelve configurations with `flower-vfl run` and prints a digest of each one's
weights, optimizers and random states. Digests depend on the machine and on torch.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

WEIGHTS = ("model", "objective", "aggregation", "optimizer", "random")
SMALL = "--dataset breast-cancer --epochs 3 --batch-size 64"
CONFIGURATIONS = {
    "plain": SMALL,
    "three parties": f"{SMALL} --parties 3 --label-share 0.2 --aggregation sum",
    "sgd": f"{SMALL} --optimizer sgd:lr=0.05,momentum=0.9 --aggregation mean",
    "classes": "--dataset digits --epochs 3 --batch-size 128 --top mlp:hidden=16",
    "cnn": "--dataset bhi --epochs 2 --batch-size 64 --limit 300 --width 8",
    "regression": "--dataset diabetes --epochs 5 --valid-fraction 0.2 --patience 2",
    "iso": f"{SMALL} --defense iso:t=4 --attack norm,cosine,mean,median",
    "marvell at label": f"{SMALL} --defense marvell:s=4 --defense-at label",
    "gafm": f"{SMALL} --objective gafm --width 1 --aggregation mean",
    "gafm-original": f"{SMALL} --objective gafm-original --width 1 --aggregation sum",
    "ladsg": f"{SMALL} --preset ladsg --label-share 0.3",
    "chain": f"{SMALL} --defense 'gc:keep=0.5 | mg | ng' --parties 4",
}


def digest(value: object) -> str:
    """Return a digest of nested containers of tensors."""
    found = hashlib.sha256()

    def add(part: object) -> None:
        if isinstance(part, torch.Tensor):
            found.update(part.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                found.update(str(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for entry in part:
                add(entry)

    add(value)
    return found.hexdigest()[:16]


def run(name: str, options: str) -> str:
    """Train one configuration and return the digest of all weights it saved."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(sys.executable).with_name("flower-vfl")
        command = f"'{script}' run {options} --out '{folder}' --json"
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
        subprocess.run(
            command, shell=True, check=True, env=environment, stdout=subprocess.DEVNULL
        )
        files = sorted(Path(folder).glob("parties/*/final.pt"))
        files = [file for file in files if file.parent.name != "strategy"]
        if not files:
            raise SystemExit(f"{name}: no weights in {list(Path(folder).iterdir())}")
        states = [torch.load(file, weights_only=True) for file in files]
        return digest([{key: each.get(key) for key in WEIGHTS} for each in states])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    before = json.loads(given.compare.read_text()) if given.compare else {}
    found = {}
    for name, options in CONFIGURATIONS.items():
        found[name] = run(name, options)
        same = f" same: {found[name] == before[name]}" if name in before else ""
        print(f"{name}: {found[name]}{same}", flush=True)
    if given.write:
        given.write.write_text(json.dumps(found, indent=1))
    if any(found[name] != before.get(name, found[name]) for name in found):
        raise SystemExit("the weights differ")


main()
