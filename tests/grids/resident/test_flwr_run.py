"""Sessions inside Flower's own runtimes, through the benchmark that measures them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def hops() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "hops.py"
    spec = importlib.util.spec_from_file_location("hops_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.extra
def test_a_simulation_on_ray(hops: ModuleType) -> None:
    # The app checks every reply; half of the target leaves room for a busy machine.
    result = hops.measure(8, False, plain=5, fast=50, payload=4096)
    assert result["plain"] > 10 * result["fast"]
