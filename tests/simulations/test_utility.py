"""How good a model the default settings train, over some seeds."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig

# Dataset, metric, least mean over the seeds, seeds. `benchmarks/utility.py` runs all of
# them with five seeds and beside a plain PyTorch loop.
BUNDLED = [
    ("breast-cancer", "test_auc", 0.985, 2),
    ("diabetes", "test_pearson", 0.65, 2),
    ("digits", "test_accuracy", 0.95, 1),
    pytest.param("breast-cancer", "test_auc", 0.985, 5, marks=pytest.mark.extra),
    pytest.param("diabetes", "test_pearson", 0.65, 5, marks=pytest.mark.extra),
    pytest.param("digits", "test_accuracy", 0.95, 3, marks=pytest.mark.extra),
]
FROM_FILES = [
    ("spambase", "test_auc", 0.95, 1),
    pytest.param("credit-default", "test_auc", 0.75, 1, marks=pytest.mark.extra),
]


def mean_score(dataset: str, metric: str, seeds: int) -> float:
    scores = []
    for seed in range(seeds):
        config = RunConfig(dataset=dataset, seed=seed, evaluate_every=20)
        with InProcessGrid(client_app, 3, config.to_run_config()) as grid:
            document = train(grid, config, "in-process", progress=False)
        scores.append(document["final"][metric])
    return statistics.mean(scores)


@pytest.mark.parametrize(("dataset", "metric", "least", "seeds"), BUNDLED)
def test_bundled_data(dataset: str, metric: str, least: float, seeds: int) -> None:
    assert mean_score(dataset, metric, seeds) >= least


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "metric", "least", "seeds"), FROM_FILES)
def test_data_files(
    dataset: str, metric: str, least: float, seeds: int, data_folder: Path
) -> None:
    assert mean_score(dataset, metric, seeds) >= least
