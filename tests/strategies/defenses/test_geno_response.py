"""Geno suspects a party that responds too strongly to its gradients."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import Result
from records_cases import series_of
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks.malicious import MaliciousAdam
from flower_vfl.strategies import Compose, Defense, VerticalStrategy, build_defense
from flower_vfl.strategies.defenses.geno import MEASUREMENTS, TRACKED, Geno, Responses
from flower_vfl.transform import Batch, sees_embeddings

ROWS, WIDTH = 6, 3


def walk(
    responses: Responses,
    party: str,
    lengths: list[float],
    norm: float = 1.0,
    first: int = 0,
) -> None:
    """Move all embeddings of a party by given lengths, one epoch a batch."""
    stream = torch.Generator().manual_seed(len(party))
    place = torch.randn(ROWS, WIDTH, generator=stream)
    for length in [0.0, *lengths]:
        step = torch.randn(ROWS, WIDTH, generator=stream)
        place = place + length * step / step.norm(dim=1, keepdim=True)
        gradient = torch.randn(ROWS, WIDTH, generator=stream)
        gradient = norm * gradient / gradient.norm(dim=1, keepdim=True)
        order = torch.randperm(ROWS, generator=stream)
        rows = first + torch.arange(ROWS)
        responses.observe(party, place[order], rows[order], gradient)


def test_a_response_is_movement_over_gradient() -> None:
    responses = Responses()
    walk(responses, "a", [0.6] * MEASUREMENTS, norm=0.1)
    assert responses.ratio("a") is None  # there is nobody to compare with
    walk(responses, "b", [0.2] * MEASUREMENTS, norm=0.2)
    walk(responses, "cc", [0.1] * MEASUREMENTS, norm=0.05)
    # 6, 1 and 2; of two others the median is between their logarithms
    assert responses.ratio("a") == pytest.approx(6 / math.sqrt(2), rel=1e-4)
    assert responses.ratio("b") == pytest.approx(1 / math.sqrt(12), rel=1e-4)
    assert responses.ratio("cc") == pytest.approx(2 / math.sqrt(6), rel=1e-4)


def test_it_is_a_median_over_the_last_batches() -> None:
    lengths = [float(n) for n in np.random.default_rng(0).uniform(1, 9, 120)]
    responses = Responses()
    walk(responses, "a", lengths)
    walk(responses, "b", [1.0] * MEASUREMENTS)
    expected = np.exp(np.median(np.log(lengths[-MEASUREMENTS:])))
    assert responses.ratio("a") == pytest.approx(expected, rel=1e-4)


def test_it_is_not_known_at_first() -> None:
    responses = Responses()
    walk(responses, "a", [1.0] * (MEASUREMENTS - 1))
    walk(responses, "b", [1.0] * MEASUREMENTS)
    assert responses.ratio("a") is None
    assert responses.ratio("b") is None
    assert responses.ratio("nobody") is None


def test_rows_far_down_are_not_remembered() -> None:
    responses = Responses()
    for party in "ab":
        walk(responses, party, [1.0] * MEASUREMENTS, first=TRACKED)
    assert responses.ratio("a") is None
    walk(responses, "a", [2.0] * MEASUREMENTS, first=TRACKED - 2)
    walk(responses, "b", [1.0] * MEASUREMENTS, first=TRACKED - 2)
    assert responses.ratio("a") == pytest.approx(2.0, rel=1e-4)


def test_standing_still_and_no_gradient_are_no_measurement() -> None:
    responses = Responses()
    walk(responses, "a", [0.0] * 200)
    walk(responses, "b", [1.0] * 200, norm=0.0)
    walk(responses, "c", [1.0] * 200)
    assert [responses.ratio(party) for party in "abc"] == [None] * 3


def test_a_rise_is_relative_to_the_own_start() -> None:
    responses = Responses()
    walk(responses, "b", [1.0] * MEASUREMENTS)
    walk(responses, "a", [4.0] * (2 * MEASUREMENTS - 1))
    place = torch.zeros(1, WIDTH)
    for _ in range(MEASUREMENTS + 1):
        place = place + torch.tensor([[0.0, 12.0, 0.0]])
        gradient = torch.tensor([[1.0, 0.0, 0.0]])
        found = responses.observe("a", place, torch.tensor([ROWS]), gradient)
    assert found is not None
    assert found == pytest.approx((12.0, 3.0), rel=1e-4)


def test_what_is_kept_goes_on() -> None:
    whole, halves = Responses(), Responses()
    walk(whole, "b", [1.0] * MEASUREMENTS)
    walk(halves, "b", [1.0] * MEASUREMENTS)
    walk(whole, "a", [3.0] * 40)
    walk(halves, "a", [3.0] * 40)
    again = Responses()
    again.load_state_dict(halves.state_dict())
    for each in (whole, again):
        walk(each, "a", [3.0] * 20)
    assert whole.ratio("a") == again.ratio("a") is not None
    assert str(whole.state_dict()) == str(again.state_dict())


@pytest.mark.parametrize(
    ("before", "after", "suspected"),
    [(1.0, 3.0, 1.0), (1.0, 2.4, 0.0), (2.0, 3.0, 0.0), (4.8, 4.9, 0.0), (1, 5.1, 1)],
)
def test_who_is_suspected(before: float, after: float, suspected: float) -> None:
    """From five times the others on, or from half of that on after a rise to twice."""
    geno = Geno()
    lengths = {"a": [before] * 100 + [after] * 100, "b": [1.0] * 200}
    places = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}
    for step in range(200):
        for party in "ab":
            places[party] = places[party] + lengths[party][step] / math.sqrt(2)
            sent, rows = places[party], torch.arange(2)
            batch = Batch(party, step + 1, 0, embedding=sent, rows=rows)
            geno(torch.eye(2), batch)
            if (step, party) == (99, "a"):
                assert batch.metrics["suspected"] == 0.0
            if (step, party) == (199, "a"):
                assert batch.metrics["suspected"] == suspected
                assert batch.metrics["response"] == pytest.approx(after, rel=1e-3)
    assert batch.metrics["suspected"] == 0.0


def train(
    geno: Any, gamma: float = 0.0, placement: str = "strategy", epochs: int = 20
) -> Result:
    """Train two passive parties on real data; the second may attack."""
    data = load_breast_cancer()
    columns = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0)).float()
    torch.manual_seed(0)

    def party(features: Tensor, strength: float) -> PassiveParty:
        model = nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 8))
        adam = partial(MaliciousAdam, lr=1e-3, gamma=strength)
        return PassiveParty(features, model, device="cpu", optimizer=adam)

    top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    labels = torch.tensor(data.target)
    label = LabelParty(
        labels,
        CrossEntropy(top),
        device="cpu",
        trust_server=True,
        build_defense=build_defense,
    )
    strategy = VerticalStrategy(
        batch_size=65,
        evaluate_every=0,
        progress=False,
        defense=Defense(geno if isinstance(geno, str) else [geno], at=placement),
    )
    parties = [label, party(columns[:, ::2], 0.0), party(columns[:, 1::2], gamma)]
    with in_process(parties) as grid:
        return strategy.start(grid, num_rounds=epochs)


def last(result: Result, metric: str) -> list[float]:
    series: dict[str, Any] = series_of(result)  # type: ignore[attr-defined]
    return [series[f"{metric}/passive-{n}"]["values"][-1] for n in (1, 2)]


def test_honest_parties_are_not_suspected() -> None:
    result = train(Geno(exclude=True))
    assert last(result, "suspected") == [0.0, 0.0]
    assert last(result, "withheld") == [0.0, 0.0]
    one, other = last(result, "response")
    assert one == pytest.approx(1 / other, rel=0.2)
    assert max(one, other) < 2


def test_an_active_party_is_suspected(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        result = train(Geno(), gamma=25.0)
    assert last(result, "suspected") == [0.0, 1.0]
    assert last(result, "withheld") == [0.0, 0.0]
    said = [r.message for r in caplog.records if "may scale up its" in r.message]
    assert len(said) == 1
    assert said[0].startswith("step 57: the embeddings of 'passive-2' move 11")
    assert "geno:exclude=true would withhold" in said[0]


def test_a_suspect_can_be_excluded() -> None:
    result = train(Geno(exclude=True), gamma=25.0)
    assert last(result, "withheld") == [0.0, 1.0]
    series: dict[str, Any] = series_of(result)  # type: ignore[attr-defined]
    withheld = series["withheld/passive-2"]["values"]
    first = withheld.index(1.0)
    assert first == 7 + MEASUREMENTS - 1  # a first epoch of seven steps, from 0
    assert set(withheld[first:]) == {1.0}
    assert sum(series["withheld/passive-1"]["values"]) == 0


def test_strategy_and_label_party_see_the_same() -> None:
    here = train(Geno(), gamma=5.0, epochs=10)
    there = train("geno", gamma=5.0, placement="label", epochs=10)
    for party in ("passive-1", "passive-2"):
        one, other = (series_of(r)[f"response/{party}"] for r in (here, there))  # type: ignore[attr-defined]
        assert one["steps"] == other["steps"]
        assert one["values"] == pytest.approx(other["values"])


def test_it_looks_only_where_it_is_asked_to() -> None:
    assert sees_embeddings(Geno())
    assert not sees_embeddings(Geno(response=None))
    assert sees_embeddings(Compose([build_defense("max-norm"), Geno()]))
    assert not sees_embeddings(build_defense("max-norm"))
    result = train(Geno(response=None), gamma=25.0, epochs=10)
    assert "suspected/passive-1" not in series_of(result)  # type: ignore[attr-defined]


def test_without_embeddings_it_looks_at_norms() -> None:
    batch = Batch("p", 1, 0)
    assert Geno()(torch.ones(2, 2), batch) is not None
    assert batch.metrics == {"withheld": 0.0}


def test_suspects_survive_a_restart() -> None:
    geno, again = Geno(), Geno()
    geno.suspects.add("p")
    again.load_state_dict(geno.state_dict())
    assert again.suspects == {"p"}
    with pytest.raises(ConfigError, match="the saved state has history, streak"):
        Geno().load_state_dict({"history": {}, "streak": {}})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"response": 1.0}, "response must be above 1 or none, got 1"),
        ({"response": math.inf}, "response"),
        ({"rise": 1.0}, "rise must be above 1, got 1"),
        ({"response": None, "exclude": True}, "exclude must be false where response"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Geno(**settings)
