"""Predictions for a passive party that does not say whom it asks about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import nn
from vertical_cases import ROWS, WIDTH, bottom, features, labels, simple_parties

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    Imputation,
    LabelParty,
    PartyError,
    in_process,
)
from flower_vfl.grids.wrapped import WrappedGrid
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.protocol.messages import Verb, read
from flower_vfl.protocol.serving import find_batches, serving_batches
from flower_vfl.strategies import VerticalStrategy


class Listening(WrappedGrid):
    """Keeps what is said while predictions are served."""

    def __init__(self, inner: Grid) -> None:
        super().__init__(inner)
        self.heard: list[tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = list(messages)
        replies = list(super().send_and_receive(asked, timeout=timeout))
        for message in (*asked, *replies):
            if message.metadata.message_type == Verb.SERVE:
                content = read(message)
                config = {k: v for k, v in content.config.items() if k != "turn"}
                arrays = {k: tuple(t.shape) for k, t in content.tensors().items()}
                self.heard.append((config, arrays))
        return replies


def trained(label: LabelParty, passive: list[PassiveParty]) -> tuple[Any, Listening]:
    grid = Listening(in_process([label, *passive]))
    strategy = VerticalStrategy(batch_size=16, test_fraction=0.0, progress=False)
    strategy.start(grid, num_rounds=1)
    return strategy, grid


def row_index(number: int) -> RowIndex:
    order = np.random.default_rng(number).permutation(ROWS + 20)
    local = np.full(ROWS + 20, -1)
    local[order[:ROWS]] = np.arange(ROWS)
    return RowIndex(torch.from_numpy(local))


def test_an_embedding_goes_out_and_a_prediction_comes_back() -> None:
    label, passive = simple_parties(1)
    strategy, grid = trained(label, passive)
    passive[0].questions = [7, 3]
    strategy.serve("passive-1")
    with torch.no_grad():
        embedding = passive[0].model.eval()(features(1)[[7, 3]])
        expected = label.objective.predict(embedding)
    assert torch.equal(passive[0].answers, expected)
    assert grid.heard == [
        ({"stage": "ask", "hide": 0}, {}),
        ({}, {"passive-1": (2, WIDTH)}),
        (
            {"stage": "predict", "batch": 0, "hide": 0, "party": "passive-1"},
            {"passive-1": (2, WIDTH)},
        ),
        ({}, {"predictions": (2,)}),
        ({"stage": "tell", "hide": 0}, {"predictions": (2,)}),
        ({}, {}),
    ]  # no id, and no row number


def test_a_row_hides_in_an_agreed_batch() -> None:
    torch.manual_seed(0)
    label = LabelParty(
        labels(),
        CrossEntropy(nn.Linear(9, 1)),
        features=features(0),
        model=bottom(),
        device="cpu",
        imputation=Imputation(secret=1),
    )
    passive = [
        PassiveParty(
            features(i), bottom(), device="cpu", imputation=Imputation(secret=1)
        )
        for i in (1, 2)
    ]
    for number, party in enumerate((label, *passive)):
        party.place(row_index(number))
    strategy, grid = trained(label, passive)
    asked = [11, 40]
    passive[1].questions = asked
    strategy.serve("passive-2", hide=10)
    told = [config for config, _ in grid.heard if "batches" in config]
    where = find_batches(passive[1], torch.tensor(asked), 10).tolist()
    assert told == [{"batches": sorted({number for number, _ in where})}]
    sizes = {shape[0] for _, arrays in grid.heard for shape in arrays.values()}
    assert sizes == {10}  # nothing of a single row
    whole = strategy.predict("train")  # all rows are training rows
    rows = [row_index(2).local.tolist().index(own) for own in asked]
    assert passive[1].answers.tolist() == pytest.approx(whole[rows].tolist(), abs=1e-6)


def test_batches_are_the_same_for_all_and_hold_every_row_once() -> None:
    batches = serving_batches(25, 3, 10)
    assert [len(batch) for batch in batches] == [9, 8, 8]
    assert sorted(torch.cat(batches).tolist()) == list(range(25))
    again = serving_batches(25, 3, 10)
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(batches[0], serving_batches(25, 4, 10)[0])
    with pytest.raises(ConfigError, match="at least 2"):
        serving_batches(25, 3, 1)


def test_who_needs_to_know_the_row_says_so() -> None:
    label, passive = simple_parties(2)
    strategy, _ = trained(label, passive)
    with pytest.raises(ConfigError, match="hide=100"):
        strategy.serve("passive-1")
    with pytest.raises(ConfigError, match="passive-1, passive-2"):
        strategy.serve("passive-3", hide=5)


def test_nothing_asked_and_rows_that_were_not_aligned() -> None:
    label, passive = simple_parties(1)
    strategy, _ = trained(label, passive)
    strategy.serve("passive-1")
    assert len(passive[0].answers) == 0
    strategy.serve("passive-1", hide=5)
    assert len(passive[0].answers) == 0
    for party in (label, *passive):
        party.place(RowIndex(torch.arange(40)))
    strategy, _ = trained(label, passive)
    passive[0].questions = [50]
    with pytest.raises(PartyError, match="not aligned"):
        strategy.serve("passive-1", hide=5)
    strategy.serve("passive-1")  # an embedding alone needs no alignment
    assert len(passive[0].answers) == 1
