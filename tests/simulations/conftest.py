"""Fixtures of the tests that look at datasets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flower_vfl.simulations.datasets import data_folders


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
