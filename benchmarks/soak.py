"""Memory and open files of a long training under Ray, with the leakage meter on.

    python benchmarks/soak.py --minutes 30

Eight passive parties and the label party train under ``flwr run`` until the time is
over. At intervals the script prints the memory (RSS) and the open files of the process
of the server and of every process of clients. In the end it prints how much each grew
per step: the slope of a line through the second half of the samples. It exits with 1 if
a process grew by more than --limit KB per step or opened more files.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from flower_vfl.parties.schedule import count_batches
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import load_rows
from flower_vfl.simulations.runtime.flower_runtime import run_app

APP = Path(__file__).parents[1] / "simulations" / "label_leakage"
SERVER, CLIENT = "flwr-simulation", "ray::ClientAppActor"
EPOCHS = 10**6


class TimeIsOverError(Exception):
    """Raised to end the run."""


class Watch:
    """Samples the processes of the run whenever its log tells of an epoch."""

    def __init__(self, minutes: float, every: float, steps: int) -> None:
        self.end, self.every = time.monotonic() + 60.0 * minutes, every
        self.steps = steps  # of an epoch
        self.next = 0.0
        self.samples: dict[str, list[tuple[int, float, int]]] = {}

    def line(self, text: str) -> None:
        """Read a line of the log."""
        if not (found := re.search(r"epoch (\d+):", text)):
            return
        now = time.monotonic()
        if now >= self.next:
            self.next = now + self.every
            self.sample(int(found[1]) * self.steps)
        if now >= self.end:
            raise TimeIsOverError

    def sample(self, step: int) -> None:
        """Note and print memory in KB and open files of every process."""
        shown = []
        for name, process in sorted(processes().items()):
            size, files = process.memory_info().rss / 1024, process.num_fds()
            self.samples.setdefault(name, []).append((step, size, files))
            shown.append(f"{name} {size / 1024:.1f} MB, {files} files")
        print(f"step {step}: {'; '.join(shown)}", flush=True)

    def growth(self, limit: float) -> bool:
        """Print the growth in the second half; return whether it is below the limit."""
        fine = True
        for name, samples in self.samples.items():
            half = np.array(samples[len(samples) // 2 :])
            if len(half) < 3:
                continue
            slope = np.polyfit(half[:, 0], half[:, 1], 1)[0]
            files = int(half[-1, 2] - half[0, 2])
            fine &= slope <= limit and files <= 0
            steps = f"steps {half[0, 0]:.0f} to {half[-1, 0]:.0f}"
            print(f"{name}: {slope:+.4f} KB per step, {files:+d} files ({steps})")
        return fine


def processes() -> dict[str, psutil.Process]:
    """Return the processes that run the ServerApp and the ClientApps."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        if words.startswith(CLIENT):
            found[f"clients-{process.pid}"] = process
        elif SERVER in words and "--" in words and "superexec" not in words:
            found["server"] = process
    return found


def main() -> None:
    """Train until the time is over and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds")
    parser.add_argument("--parties", type=int, default=8)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--attack", default="norm,cosine,mean,median")
    parser.add_argument("--limit", type=float, default=0.3, help="KB per step")
    given = parser.parse_args()
    config = RunConfig(
        dataset=given.dataset,
        parties=given.parties,
        width=4,
        batch_size=given.batch_size,
        attack=given.attack,
        epochs=EPOCHS,
    )
    rows = int((load_rows(config, 0).codes == 0).sum())
    watch = Watch(given.minutes, given.every, count_batches(rows, config.batch_size))
    start = time.monotonic()
    with suppress(TimeIsOverError):
        run_app(
            APP,
            run_config=config.to_run_config(),
            nodes=config.parties + 1,
            on_line=watch.line,
        )
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.1f} minutes, {given.parties} passive parties, {given.attack}")
    if not watch.growth(given.limit):
        sys.exit(f"more than {given.limit:g} KB per step, or more open files")


if __name__ == "__main__":
    main()
