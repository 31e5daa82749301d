"""Synthetic features: what is drawn, what is trained, what is saved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from flower_vfl import Imputation, PassiveParty
from flower_vfl.errors import ConfigError
from flower_vfl.parties.imputation.feature_imputer import (
    FEATURE_SYNTHESIZERS,
    At,
    FeatureSynthesizer,
    Gaussian,
    Random,
    draw_donors,
)
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.randomness import Noise
from flower_vfl.specs import build_from_spec

LOCAL = torch.tensor([3, -1, 0, -1, 1, -1, 2, -1])
REAL = torch.tensor([True, False]).repeat(20)
POOL = torch.tensor([3, 0, 1, 2])
WEIGHT = torch.arange(12.0).reshape(4, 3)


def run(rows: Tensor) -> Tensor:
    return WEIGHT.index_select(0, rows)


def fitted(text: str, secret: int = 5, local: Tensor = LOCAL) -> FeatureSynthesizer:
    synthesizer = build_from_spec(
        "kind of synthetic features", text, FEATURE_SYNTHESIZERS
    )
    synthesizer.fit(local, POOL, secret)
    return synthesizer


def batch_of(
    rows: list[int], at: int = 1, training: bool = True
) -> tuple[Tensor, At, bool]:
    return torch.tensor(rows), ("train", at), training


def test_no_donor_comes_twice_before_all_have_come() -> None:
    drawn = draw_donors(10, POOL, Noise(1)).tolist()
    assert sorted(drawn[:4]) == sorted(drawn[4:8]) == [0, 1, 2, 3]
    assert len(set(drawn[8:])) == 2
    assert len(draw_donors(0, POOL, Noise(1))) == 0


def test_donors_are_drawn_evenly() -> None:
    counts = torch.zeros(4)
    for seed in range(2000):
        counts[draw_donors(1, POOL, Noise(seed))] += 1
    # 2000/4 with a standard deviation of 19.4
    assert (counts - 500).abs().max() < 4 * 19.4


def test_gaussian_embeddings_have_the_variance_of_the_paper() -> None:
    real = torch.tensor([[3.0, 4.0], [0.0, 1.0]])  # the largest norm is 5
    normal = Noise(2).normal((40000, 2))
    drawn = Gaussian(scale=2.0).scaled(normal, real)
    assert drawn.var(dim=0).tolist() == pytest.approx([25.0, 25.0], rel=0.03)
    assert drawn.mean(dim=0).abs().max() < 4 * 5 / math.sqrt(40000)
    cube = Gaussian(2.0).scaled(normal.reshape(-1, 2, 1), real.reshape(2, 2, 1))
    assert torch.equal(cube.reshape(-1, 2), drawn)


def test_random_embeddings_have_mean_and_deviation() -> None:
    mean, deviation = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    random = Random()
    random.load_state_dict({"moving": [mean, deviation]})
    random._record(torch.zeros(1, 2), training=False)
    drawn = random.scaled(Noise(3).normal((40000, 2)), torch.zeros(1, 2))
    assert drawn.mean(dim=0).tolist() == pytest.approx([1.0, -2.0], abs=0.06)
    assert drawn.std(dim=0).tolist() == pytest.approx([0.5, 3.0], rel=0.03)


def test_a_row_keeps_its_donor_for_the_whole_run() -> None:
    sampling = fitted("sampling")
    first = sampling.embed(*batch_of([0, 1, 3, 5, 7], at=1), run)
    later = sampling.embed(*batch_of([7, 5, 3, 1, 0], at=9), run)
    assert torch.equal(first, later.flip(0))
    assert torch.equal(first[0], WEIGHT[3])  # its own row
    donors = [int(row[0]) // 3 for row in first[1:]]
    assert sorted(donors) == [0, 1, 2, 3]  # four missing rows, four real ones


def test_fresh_donors_differ_between_batches_and_repeat_for_one() -> None:
    sampling = fitted("sampling:fixed=false")
    rows = [1, 3, 5]
    found = [sampling.embed(*batch_of(rows, at), run) for at in range(8)]
    assert len({tuple(part.flatten().tolist()) for part in found}) > 1
    assert torch.equal(found[2], sampling.embed(*batch_of(rows, 2), run))


def test_donors_depend_on_the_secret() -> None:
    many = torch.full((64,), -1)
    found = [
        fitted("sampling", secret, many).embed(*batch_of(list(range(64))), run)
        for secret in (1, 1, 2)
    ]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("text", ["gaussian", "random"])
def test_drawn_embeddings_carry_no_graph(text: str) -> None:
    weight = WEIGHT.clone().requires_grad_()
    output = fitted(text).embed(
        *batch_of([0, 1, 2, 3]), lambda rows: weight.index_select(0, rows)
    )
    output.sum().backward()
    assert weight.grad is not None
    assert weight.grad.sum(dim=1).tolist() == [3.0, 0.0, 0.0, 3.0]  # rows 3 and 0
    assert torch.equal(output[0], weight[3]) and torch.equal(output[2], weight[0])


@pytest.mark.parametrize("text", ["sampling", "gaussian", "random"])
@pytest.mark.parametrize("rows", [[1, 3, 5], [0, 1, 3], [1], [0, 2]])
def test_batches_with_few_or_no_real_rows_work(text: str, rows: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    if text == "sampling" and rows == [1]:
        model = nn.Sequential(nn.Linear(3, 4))  # one row: as with a real one
    output = fitted(text).embed(*batch_of(rows), lambda own: model(run(own)))
    assert output.shape == (len(rows), 4) and torch.isfinite(output).all()


def test_moving_averages_are_those_of_real_rows_and_count_when_a_step_ends() -> None:
    random = fitted("random:momentum=0.25")
    random.embed(*batch_of([0, 2, 1]), run)  # own rows 3 and 0
    assert random.state_dict() == {}  # the step is not complete
    random.commit()
    mean, deviation = WEIGHT[[3, 0]].mean(dim=0), WEIGHT[[3, 0]].std(0, correction=0)
    kept = random.state_dict()["moving"]
    assert torch.equal(kept[0], mean) and torch.equal(kept[1], deviation)
    random.embed(*batch_of([4, 6, 1], at=2), run)  # own rows 1 and 2
    random.embed(*batch_of([0, 1], at=2, training=False), run)  # teaches nothing
    again = random.embed(*batch_of([4, 6, 1], at=2), run)
    random.commit()
    kept = random.state_dict()["moving"]
    expected = 0.75 * mean + 0.25 * WEIGHT[[1, 2]].mean(dim=0)
    assert torch.allclose(kept[0], expected)
    other = fitted("random:momentum=0.25")
    other.load_state_dict({"moving": [mean, deviation]})
    assert torch.equal(other.embed(*batch_of([4, 6, 1], at=2), run), again)


def test_a_party_without_training_rows_is_refused() -> None:
    synthesizer = build_from_spec(
        "kind of synthetic features", "sampling", FEATURE_SYNTHESIZERS
    )
    with pytest.raises(ConfigError, match="none of the training rows"):
        synthesizer.fit(LOCAL, POOL[:0], 1)
    synthesizer.fit(POOL, POOL[:0], 1)  # it lacks nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("samplin", "gaussian, random, sampling"),
        ("gaussian:scale=0", "positive"),
        ("random:momentum=2", "up to 1"),
        ("sampling:k=3", "unknown parameter"),
    ],
)
def test_wrong_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_from_spec("kind of synthetic features", text, FEATURE_SYNTHESIZERS)


def test_a_step_and_a_part_of_an_evaluation_have_noise_of_their_own() -> None:
    """Otherwise, synthetic rows have one direction in both, and real rows do not."""
    party = PassiveParty(
        torch.randn(20, 3),
        nn.Linear(3, 2),
        name="shop",
        device="cpu",
        imputation=Imputation("gaussian", secret=1),
    )
    party.place(RowIndex(torch.arange(20).repeat_interleave(2).where(REAL, -1)))
    party.configure(TrainingConfig(1, 20, 20, test_fraction=0.0))
    trained, evaluated = party.forward(1, 1, 0), party.embed("train", 1)
    both = ~REAL[party._batches[0]] & ~REAL[20:]
    assert both.any()
    cosines = torch.cosine_similarity(trained[both], evaluated[both])
    assert (cosines < 0.99).any()
