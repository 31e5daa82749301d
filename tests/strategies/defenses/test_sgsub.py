"""Gradients that are replaced by sampled ones: SGSub and FLSG."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial import distance
from scipy.stats import beta, kstest, norm, rankdata
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.randomness import Noise
from flower_vfl.strategies.defenses.sgsub import (
    FLSG,
    SGSub,
    ascending,
    ascending_normal,
    exponential_sums,
    flsg,
    sgsub,
)
from flower_vfl.transform import Batch


def stream(seed: int = 0) -> Noise:
    return Noise(seed)


def gradient(rows: int = 6, columns: int = 3, seed: int = 0) -> Tensor:
    drawn = torch.randn(
        rows,
        columns,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    return drawn.pow(3).mul(1e-3).add(2e-4)  # skewed by the mean, with heavy tails


def candidates(
    rows: Tensor, number: int, seed: int, literal: bool = False
) -> list[NDArray[np.float64]]:
    """Return the sampled numbers of the first attempts, in ascending order or not."""
    flat, source = rows.numpy().reshape(-1), stream(seed)

    def drawn() -> NDArray[np.float64]:
        if literal:
            return source.normal((flat.size,), rows.dtype).numpy()
        sums = -np.log(np.abs(source.signed(flat.size + 1, rows.dtype).numpy()))
        return norm.ppf(sums.cumsum()[:-1] / sums.sum())

    return [
        np.clip(drawn() * flat.std() + flat.mean(), flat.min(), flat.max())
        for _ in range(number)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_statistics_are_those_of_sorted_samples(dtype: torch.dtype) -> None:
    """Each one of 9 has a beta distribution of probabilities (exact, not sampled)."""
    source, size = stream(), 9
    normal = [ascending_normal(source, size, dtype).numpy() for _ in range(2000)]
    uniform = []
    for _ in range(2000):
        sums, total, _ = exponential_sums(source, size, dtype)
        uniform.append(sums.numpy() / total)
    for drawn in (norm.cdf(np.stack(normal)), np.stack(uniform)):
        assert (np.diff(drawn, axis=1) >= 0).all()
        for place in range(size):
            exact = beta(place + 1, size - place).cdf
            assert kstest(drawn[:, place], exact).pvalue > 1e-4
        # and two together: the smallest and the largest
        spread = drawn[:, -1] - drawn[:, 0]
        assert kstest(spread, beta(size - 1, 2).cdf).pvalue > 1e-4


def test_the_tails_of_a_long_sample() -> None:
    """Single precision has no digits next to 1: probabilities of 1e-6 survive it."""
    size, source = 2**18, stream(1)
    lowest, highest = [], []
    for _ in range(60):
        found = ascending_normal(source, size, torch.float32).double().numpy()
        assert (np.diff(found) >= 0).all()
        lowest.append(norm.cdf(found[2]))
        highest.append(norm.sf(found[-3]))
    for tail in (lowest, highest):
        assert kstest(tail, beta(3, size - 2).cdf).pvalue > 1e-3
    assert kstest(found, "norm").pvalue > 1e-3
    assert found.std() == pytest.approx(1.0, abs=0.01)


def reordered(sample: NDArray[np.float64], rows: Tensor) -> NDArray[np.float64]:
    places = rankdata(rows.numpy(), method="ordinal", axis=None) - 1
    return np.sort(sample)[places]


def distances(sample: NDArray[np.float64], rows: Tensor) -> tuple[float, float]:
    """Return 1 − cos and D_M/√n, with the whole inverse covariance written out."""
    flat = rows.numpy().reshape(-1)
    variances = np.tile(rows.numpy().var(axis=0) + 1e-12, len(rows))
    mahalanobis = distance.mahalanobis(sample, flat, np.diag(1 / variances))
    return distance.cosine(sample, flat), mahalanobis / math.sqrt(flat.size)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_candidate_and_its_score(seed: int) -> None:
    rows = gradient(seed=seed)
    (sample,) = candidates(rows, 1, seed)
    expected = reordered(sample, rows)
    turned, far = distances(expected, rows)
    found = sgsub(rows, stream(seed), w_cos=0.3, w_m=0.9, tau=math.inf)
    assert found.attempts == 1
    assert np.allclose(found.rows.numpy().reshape(-1), expected, rtol=1e-12)
    assert found.score == pytest.approx(0.3 * turned + 0.9 * far, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_literal_score_is_taken_before_the_order(seed: int) -> None:
    rows = gradient(seed=seed)
    (sample,) = candidates(rows, 1, seed, literal=True)
    turned, far = distances(sample, rows)
    found = sgsub(rows, stream(seed), 0.3, 0.9, math.inf, literal=True)
    assert found.score == pytest.approx(0.3 * (1 - turned) + 0.9 * far, rel=1e-9)
    expected = reordered(sample, rows)
    assert np.allclose(found.rows.numpy().reshape(-1), expected, rtol=1e-12)


@pytest.mark.parametrize("literal", [False, True])
def test_the_first_good_one_is_taken_and_else_the_best(literal: bool) -> None:
    rows = gradient(seed=8)
    scores = []
    for sample in candidates(rows, 20, 4, literal):
        turned, far = distances(sample if literal else reordered(sample, rows), rows)
        scores.append(0.5 * (1 - turned if literal else turned) + 0.5 * far)
    found = sgsub(rows, stream(4), 0.5, 0.5, tau=-10.0, literal=literal)
    assert found.attempts == 20
    assert found.score == pytest.approx(min(scores), rel=1e-9)
    best = candidates(rows, 20, 4, literal)[int(np.argmin(scores))]
    expected = reordered(best, rows)
    assert np.allclose(found.rows.numpy().reshape(-1), expected, rtol=1e-12)
    tau = min(scores[:5]) - 1e-9  # the first five are not good enough
    first = next(i for i, score in enumerate(scores, 1) if score <= tau)
    found = sgsub(rows, stream(4), 0.5, 0.5, tau=tau, literal=literal)
    assert found.attempts == first
    assert found.score == pytest.approx(scores[first - 1], rel=1e-9)
    found = sgsub(rows, stream(4), 0.5, 0.5, -10.0, max_attempts=3, literal=literal)
    assert found.attempts == 3
    assert found.score == pytest.approx(min(scores[:3]), rel=1e-9)


def test_flsg_is_accepted_on_the_relative_euclidean_distance() -> None:
    rows = gradient(seed=2)
    flat = rows.numpy().reshape(-1)
    expected = [reordered(sample, rows) for sample in candidates(rows, 20, seed=3)]
    far = [np.linalg.norm(e - flat) / np.linalg.norm(flat) for e in expected]
    found = flsg(rows, stream(3), tau=0.0)
    assert (found.attempts, found.score) == (20, pytest.approx(min(far), rel=1e-9))
    best = expected[int(np.argmin(far))]
    assert np.allclose(found.rows.numpy().reshape(-1), best, rtol=1e-12)
    assert flsg(rows * 1e6, stream(3), 0.0).score == pytest.approx(min(far), rel=1e-9)
    assert flsg(rows, stream(3), tau=max(far)).attempts == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_orders(dtype: torch.dtype, size: int) -> None:
    entries = (
        torch.randn(size, generator=torch.Generator(), dtype=dtype)
        .mul(3)
        .round()
        .div(3)
    )
    entries[: size // 4] = -0.0
    entries[size // 4 : size // 2] = 0.0
    entries[-1] = torch.finfo(dtype).tiny / 4  # a denormal
    if size > 2:
        entries[-3:-1] = torch.tensor([-1, 1]) * torch.finfo(dtype).max
    order = ascending(entries)
    assert order.sort().values.equal(torch.arange(size))
    assert entries[order].equal(torch.sort(entries).values)


@pytest.mark.parametrize("transform", [SGSub(), SGSub(literal=True), FLSG()])
def test_order_and_range_survive_and_values_do_not(transform: SGSub | FLSG) -> None:
    rows = gradient(200, 16, seed=1).float()
    found = transform(rows, Batch("passive-1", 1, 0))
    assert found is not None
    ranked = found.reshape(-1)[ascending(rows.reshape(-1))]
    assert (ranked.diff() >= 0).all()
    assert rows.min() <= found.min() and found.max() <= rows.max()
    inside = (found > rows.min()) & (found < rows.max())
    assert inside.float().mean() > 0.9
    assert not (found == rows)[inside].any()


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([[0.3]]),
        torch.zeros(1, 1),
        torch.full((4, 3), -0.2),
        torch.zeros(4, 3),
        torch.full((4, 3), 1e-45),
    ],
)
def test_gradients_without_spread_stay(rows: Tensor, literal: bool) -> None:
    found = sgsub(rows, stream(), literal=literal)
    assert found.rows.equal(rows)
    assert math.isfinite(found.score)
    assert literal or found.score == pytest.approx(0.0, abs=1e-6)
    assert flsg(rows, stream()).rows.equal(rows)


def test_one_row_and_dead_columns() -> None:
    """Columns without variance: what counts is 1e-12."""
    rows = gradient(1, 40, seed=3)
    found = sgsub(rows, stream())
    assert found.attempts == 20 and found.score > 1.0
    assert math.isfinite(found.score)
    dead = gradient(10, 4)
    dead[:, 2] = 0.0
    (sample,) = candidates(dead, 1, 0)
    turned, far = distances(reordered(sample, dead), dead)
    found = sgsub(dead, stream(), max_attempts=1)
    assert found.score == pytest.approx(0.5 * turned + 0.5 * far, rel=1e-6)


def test_metrics() -> None:
    batch = Batch("passive-1", 4, 0)
    rows = gradient().float()
    found = SGSub(tau=0.0, max_attempts=7)(rows, batch)
    assert batch.metrics["sgsub_attempts"] == 7.0
    expected = sgsub(rows, batch.with_digest(rows).noise(), tau=0.0, max_attempts=7)
    assert found is not None and found.equal(expected.rows)
    assert batch.metrics["sgsub_score"] == expected.score
    assert FLSG(tau=0.0, max_attempts=2)(rows, batch) is not None
    assert batch.metrics["flsg_attempts"] == 2.0
    assert 0.0 < batch.metrics["flsg_distance"] < 2.0


def test_entries_are_drawn_with_their_heavy_tails() -> None:
    rows = torch.full((100, 4), 1e-4)
    rows[::20] = -1.0  # of the rare class
    rows += 1e-6 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    found = sgsub(rows, stream(), draw="entries").rows
    assert set(found.flatten().tolist()) < set(rows.flatten().tolist())
    common = torch.arange(100) % 20 != 0
    size = rows[common].abs().median()
    assert found[common].abs().median() == pytest.approx(float(size), rel=0.1)
    # normal numbers make them a thousand times as large
    assert sgsub(rows, stream()).rows[common].abs().median() > 100 * size


def test_what_the_rank_order_leaks() -> None:
    """As in ``benchmarks/transforms.py --leak``, on gradients of a made-up task."""

    def rank_auc(rows: Tensor, labels: Tensor) -> float:
        ranks = rankdata(rows.numpy(), axis=None).reshape(rows.shape)
        ranks -= ranks.mean()
        known = ranks[int(labels.argmax())]  # of one positive row
        scores = ranks @ known / np.linalg.norm(ranks, axis=1)
        return float(roc_auc_score(labels.numpy(), scores))

    source = torch.Generator().manual_seed(5)
    labels = (torch.rand(256, generator=source) < 0.3).long()
    error = torch.rand(256, generator=source) - labels  # p − y of a model so far poor
    side = torch.randn(16, generator=source)
    noise = torch.randn(256, 16, generator=source)
    rows = (error[:, None] * side + 0.2 * noise) / 256
    found = sgsub(rows, stream()).rows
    before, after = rank_auc(rows, labels), rank_auc(found, labels)
    assert before > 0.9
    assert after == pytest.approx(before, abs=0.01)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGSub(w_cos=-1.0), "w_cos must be a number from 0, got -1"),
        (lambda: SGSub(w_m=math.inf), "w_m"),
        (lambda: SGSub(tau=math.nan), "tau"),
        (lambda: SGSub(max_attempts=0), "max_attempts must be at least 1, got 0"),
        (lambda: SGSub(draw="rows"), "draw"),  # type: ignore[arg-type]
        (lambda: FLSG(tau=math.nan), "tau"),
        (lambda: FLSG(max_attempts=0), "max_attempts"),
    ],
)
def test_parameters_that_cannot_work(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]
