"""Transforms in a run: when they are called, and what their result reaches."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vertical_cases import WIDTH, assert_equal, labels, simple_parties, train, weights

from flower_vfl import Batch, CrossEntropy, LabelParty
from flower_vfl.strategies import Defense


class Recorder:
    """A transform that multiplies and notes what it was given."""

    requires_labels = False

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.seen: list[tuple[Tensor, Batch]] = []

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        self.seen.append((gradient.clone(), batch))
        noise = batch.noise().normal(gradient.shape)
        return gradient * self.factor + 0.01 * noise

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_transforms_are_called_in_order_with_their_batch() -> None:
    def run() -> tuple[Recorder, Recorder, list[Tensor]]:
        label, passive = simple_parties(trust_server=True)
        one, two = Recorder(2.0), Recorder(-3.0)
        train([label, *passive], epochs=2, defense=Defense([one, two], noise_seed=5))
        return one, two, weights(label, *passive)

    one, two, found = run()
    steps = [(b.party, b.step, b.epoch) for _, b in one.seen]
    assert steps == [
        (party, step, 1 + (step > 3))
        for step in range(1, 7)
        for party in ("passive-1", "passive-2")
    ]
    for (first, batch), (second, later) in zip(one.seen, two.seen, strict=True):
        assert batch == later
        assert batch.seed == 5 and batch.labels is None
        noise = batch.noise().normal(first.shape)
        assert torch.equal(second, first * 2.0 + 0.01 * noise)
    streams = {b.noise().integers(1).item() for _, b in one.seen}
    assert len(streams) == len(one.seen)  # one for each party and step
    assert_equal(run()[2], found)


def test_what_a_transform_returns_is_what_the_party_trains_on() -> None:
    class Nothing(Recorder):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return gradient * 0 if batch.party == "passive-1" else gradient

    label, passive = simple_parties(trust_server=True)
    before = weights(*passive)
    train([label, *passive], defense=[Nothing(0)])
    after = weights(*passive)
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [False, False, True, True]


@pytest.mark.parametrize("aggregation", ["sum", "mean", "concat"])
def test_a_transform_that_works_in_place_does_not_reach_other_parties(
    aggregation: str,
) -> None:
    """With a sum both parties' gradients are one tensor at the label party."""

    class InPlace(Recorder):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return gradient.mul_(2.0)

    class Copying(Recorder):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return gradient * 2.0

    def run(transform: Recorder) -> list[Tensor]:
        torch.manual_seed(3)
        width = 2 * WIDTH if aggregation == "concat" else WIDTH
        label = LabelParty(
            labels(), CrossEntropy(nn.Linear(width, 1)), device="cpu", trust_server=True
        )
        passive = simple_parties()[1]
        train([label, *passive], defense=[transform], aggregation=aggregation)
        return weights(label, *passive)

    assert_equal(run(InPlace(0)), run(Copying(0)))


def test_the_time_of_the_defenses_is_reported() -> None:
    class Slow(Recorder):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            time.sleep(0.01)
            return gradient

    label, passive = simple_parties(trust_server=True)
    result = train([label, *passive], epochs=2, defense=[Slow(1)])[1]
    for metrics in result.train_metrics_clientapp.values():
        spent, whole = metrics["defense_seconds"], metrics["seconds"]
        # two parties in each of three steps
        assert 0.06 <= spent < whole  # type: ignore[operator]
    label, passive = simple_parties()
    plain = train([label, *passive])[1].train_metrics_clientapp
    assert "defense_seconds" not in plain[1]
