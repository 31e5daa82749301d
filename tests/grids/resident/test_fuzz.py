"""Mutated frames and messages; `python benchmarks/fuzz.py` runs 10,000 of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from flwr.app import Message
from fuzz_campaigns import CAMPAIGNS, run_campaign
from vertical_cases import HookedGrid, rich_app

from flower_vfl import InProcessGrid, PartyError
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import VerticalStrategy


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_no_crash_no_admission_no_other_weights(name: str) -> None:
    found, _ = run_campaign(name, seed=7, cases=300)
    assert found.failures == []


@pytest.mark.parametrize("record", ["vfl-arrays", "vfl-metrics"])
def test_a_step_without_a_gradient_is_not_taken_for_a_withheld_one(record: str) -> None:
    """Found by fuzzing: the party kept its weights, and nobody noticed."""

    def remove(reply: Message) -> Message:
        if reply.metadata.message_type == Verb.TRAIN_STEP:
            reply.content[record].pop("passive-2", None)
            reply.content[record].pop("rows", None)
        return reply

    with InProcessGrid(rich_app(), 3) as grid:
        strategy = VerticalStrategy(batch_size=16, progress=False)
        with pytest.raises(PartyError, match="'label', step 1: its reply lacks"):
            strategy.start(HookedGrid(grid, after=remove), num_rounds=1)
