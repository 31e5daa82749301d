"""Runs that must fail, and what their errors must say, for several tests."""

from __future__ import annotations

from typing import Any

import pytest
from vertical_cases import HookedGrid

from flower_vfl import VerticalError, in_process
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import VerticalStrategy

TRAINING = {Verb.FORWARD.value, Verb.TRAIN_STEP.value}


def start(parties: list[Any], epochs: int = 2, **options: Any) -> None:
    options = {"batch_size": 16, "progress": False, **options}
    VerticalStrategy(**options).start(in_process(parties), num_rounds=epochs)


def fails_before_training(parties: list[Any], *words: str, **options: Any) -> str:
    """Check that a run is refused in words, and that no batch was asked for."""
    asked: list[str] = []
    grid = HookedGrid(
        in_process(parties), lambda m: asked.append(m.metadata.message_type)
    )
    options = {"batch_size": 16, "progress": False, **options}
    with pytest.raises(VerticalError) as caught:
        VerticalStrategy(**options).start(grid, num_rounds=1)
    assert not TRAINING & set(asked)
    assert_words(caught.value, *words)
    return str(caught.value)


def assert_words(error: BaseException, *words: str) -> None:
    for word in words:
        assert word in str(error), str(error)
