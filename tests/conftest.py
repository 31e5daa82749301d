"""One torch thread: small models are slower with more, and sums would depend on it."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, so that no worker is left with one at the end."""

    def weight(item: pytest.Item) -> tuple[bool, bool, bool]:
        names = {mark.name for mark in item.iter_markers()}
        deployed = "deployment" in item.nodeid
        return not deployed, "flower" not in names, "slow" not in names

    items.sort(key=weight)
