"""What several runs at a time take, beside the same runs one after the other.

The runs of a study are run with one worker, in this process, and then with several on
Ray, in another folder. The first ratio has the start of Ray and of its processes in it,
as ``flower-vfl sweep`` does. For the second Ray is running and has done a run already,
which is what counts where runs are long. 1 is no gain; 0.5 is the best of 2 workers.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.studies.study import Trial, run_study

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def seconds(config: RunConfig, runs: int, workers: int) -> float:
    """Return how long a study of a few seeds takes."""
    trials = [Trial({"seed": str(s)}, replace(config, seed=s)) for s in range(runs)]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        study = run_study(Path(folder), "sweep", "seeds", trials, workers=workers)
        if study.errors:
            raise SystemExit(str(study.errors))
        return time.perf_counter() - started


def main() -> None:
    """Print the two ratios."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    config = RunConfig(epochs=options.epochs, evaluate_every=options.epochs)
    runs, workers = options.runs, options.workers
    seconds(replace(config, epochs=1), 1, 1)  # what is loaded at first use
    alone = seconds(config, runs, 1)
    print(f"{runs} runs, 1 worker: {alone:.1f} s, {alone / runs:.1f} s each")
    cold = seconds(config, runs, workers)
    ratio = cold / alone
    print(f"{runs} runs, {workers} workers, Ray not started: {cold:.1f} s")
    print(f"ratio to 1 worker: {ratio:.2f}")
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    seconds(replace(config, epochs=1), workers, workers)
    warm = seconds(config, runs, workers)
    ray.shutdown()
    print(f"{runs} runs, {workers} workers, Ray running: {warm:.1f} s")
    print(f"ratio to 1 worker: {warm / alone:.2f}")


if __name__ == "__main__":
    main()
