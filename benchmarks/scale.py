"""Cost of a training step as the number of parties grows.

In one process first: parties one by one and stacked, with the leakage meter, in turns,
on the 1,024 columns of a synthetic table. Then under ``flwr run`` on Ray: the Flower
app of this project trains on the 64 columns of the digits, divided among 2, 8, 32 and
64 passive parties that stay resident in a few Ray actors. Prints one line per number of
parties: seconds of a step, that per party, and on Ray the memory of all processes.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path

import psutil

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import load_result, table
from flower_vfl.simulations.runtime.engines import run_and_attack
from flower_vfl.simulations.runtime.flower_runtime import run_app

APP = Path(__file__).parents[1] / "simulations" / "label_leakage"
STEPS, ROWS = 20, 72  # 1,437 training rows make 20 batches of 72


class MemoryWatch(threading.Thread):
    """Keeps the largest memory that all descendants of this process had together."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.done = threading.Event()

    def run(self) -> None:
        """Look every half second."""
        while not self.done.wait(0.5):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    # Unique memory: shared libraries would count once per process.
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue  # it ended between the two looks
            self.peak = max(self.peak, total)


def measure(parties: int) -> tuple[float, int]:
    """Return the seconds of a step and the peak memory in bytes."""
    watch = MemoryWatch()
    watch.start()
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            dataset="digits",
            parties=parties,
            epochs=1,
            batch_size=ROWS,
            evaluate_every=0,
            width=4,
            out=folder,
        )
        run_app(APP, run_config=config.to_run_config(), nodes=parties + 1, timeout=900)
        document = load_result(Path(folder))
    watch.done.set()
    assert table(document).query("metric == 'steps'")["value"].tolist() == [STEPS]
    return document["seconds"]["step"], watch.peak


def compare_engines(parties: int, rounds: int) -> None:
    """Print the time per party and step, one by one and stacked, with the meter."""
    config = RunConfig(
        dataset="synthetic",
        parties=parties,
        attack="norm,mean:held_out=true",
        coalitions="all" if parties > 1 else "",
        epochs=1,
        evaluate_every=0,
        width=4,
    )
    best: dict[str, float] = {}
    for _ in range(rounds):
        for engine in ("in-process", "stacked"):
            seconds = run_and_attack(config, engine)["seconds"]["step"]
            best[engine] = min(seconds, best.get(engine, seconds))
    single, stacked = (best[engine] * 1e3 / parties for engine in best)
    print(
        f"{parties} parties in one process, ms per party and step with the meter: "
        f"{single:.3f} one by one, {stacked:.3f} stacked, ratio {single / stacked:.2f}",
        flush=True,
    )


def main() -> None:
    """Measure every number of parties."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parties", type=int, nargs="*", default=[2, 8, 32, 64])
    parser.add_argument("--stacked", type=int, nargs="*", default=[1, 64, 1024])
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    for parties in arguments.stacked:
        compare_engines(parties, arguments.rounds)
    first = None
    for parties in arguments.parties:
        seconds, memory = measure(parties)
        first = first or (parties, seconds)
        growth = (seconds / first[1]) / (parties / first[0])
        print(
            f"{parties} parties: {seconds * 1e3:.1f} ms per step, "
            f"{seconds / parties * 1e3:.2f} ms per party, growth against linear "
            f"{growth:.2f}, {memory / 2**20:.0f} MiB in all processes",
            flush=True,
        )


if __name__ == "__main__":
    main()
