"""Fixtures: dataset files, a study to report on, and methods of one's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from report_cases import BASE, DEFENSES

from flower_vfl.leakage.attacks import SCORE_ATTACKS
from flower_vfl.simulations import plugins
from flower_vfl.simulations.datasets import data_folders
from flower_vfl.simulations.objectives import OBJECTIVES, PRESETS
from flower_vfl.simulations.report import write_report
from flower_vfl.simulations.studies.study import Trial, run_study
from flower_vfl.strategies import DEFENSES as KNOWN_DEFENSES


@pytest.fixture
def data_folder() -> Path:
    """Return the folder of the dataset files, or skip; in CI they must be there."""
    for folder in data_folders():
        if (folder / "criteo_8k.csv.gz").is_file():
            return folder
    missing = "the dataset files are not there: set FLOWER_VFL_DATA to their folder"
    if os.environ.get("FLOWER_VFL_REQUIRE_DATA"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No dataset files, and a cache of its own; returns the cache folder."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("FLOWER_VFL_DATA", str(empty))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flower-vfl"


@pytest.fixture(scope="session")
def made_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small study of real runs."""
    folder = tmp_path_factory.mktemp("study")
    trials = [
        Trial(
            {"defense": defense, "seed": str(seed)},
            replace(BASE, defense="" if defense == "none" else defense, seed=seed),
        )
        for seed in (0, 1)
        for defense in DEFENSES
    ]
    study = run_study(folder, "compare", "breast-cancer, 4 defenses", trials, bar=False)
    assert len(study.documents) == 8 and not study.errors
    return folder


@pytest.fixture(scope="session")
def made_report(made_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of the study, which no test may change."""
    folder = tmp_path_factory.mktemp("report") / "study"
    return write_report(Path(shutil.copytree(made_study, folder)))


@pytest.fixture
def study_folder(made_study: Path, tmp_path: Path) -> Path:
    """Return a copy of the study that a test may change."""
    return Path(shutil.copytree(made_study, tmp_path / "study"))


OWN = """
import torch
from flower_vfl import CrossEntropy


class Flip:
    requires_labels = False

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def __call__(self, gradient, batch):
        drawn = batch.noise().uniform((len(gradient), 1))
        return torch.where(drawn < self.share, -gradient, gradient)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class FirstColumn:
    def __call__(self, gradient, known):
        return gradient[:, 0]


def small(setup, factor: float = 0.5):
    return CrossEntropy(setup.top(), setup.classes)


DEFENSES = {"flip": Flip}
SCORE_ATTACKS = {"first-column": FirstColumn}
OBJECTIVES = {"small": (small, ("binary",))}
PRESETS = {"both": lambda: {"objective": "small", "defense": "flip"}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file with methods of one's own; they are forgotten afterwards."""
    registries = [KNOWN_DEFENSES, SCORE_ATTACKS, OBJECTIVES, PRESETS, plugins.ADDED]
    before = [dict(registry) for registry in registries]
    monkeypatch.setattr(plugins, "_LOADED", set())
    monkeypatch.setenv(plugins.VARIABLE, "")
    path = tmp_path / "own_methods.py"
    path.write_text(OWN)
    yield str(path)
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)
