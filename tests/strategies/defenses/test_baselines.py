"""Gradient compression, Laplace noise, buckets and selective sharing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.randomness import Noise
from flower_vfl.strategies.defenses.gradient_compression import (
    GradientCompression,
    compress,
)
from flower_vfl.strategies.defenses.multi_bucket import MultiBucket, quantize
from flower_vfl.strategies.defenses.noisy_gradients import NoisyGradients, laplace
from flower_vfl.strategies.defenses.ppdl import PPDL, share_selected
from flower_vfl.transform import Batch


def stream(seed: int = 0) -> Noise:
    return Noise(seed)


def gradient(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def zeros_without_sign(found: Tensor) -> bool:
    """Whether no zero is a negative one, which would tell the sign of an entry."""
    return not bool(torch.signbit(found[found == 0]).any())


def test_compression_by_hand() -> None:
    rows = torch.tensor([[3.0, -1.0], [2.0, -4.0]])
    assert compress(rows, 0.5).tolist() == [[3.0, 0.0], [0.0, -4.0]]
    assert compress(rows, 0.26).tolist() == [[3.0, 0.0], [0.0, -4.0]]
    assert compress(rows, 0.25).tolist() == [[0.0, 0.0], [0.0, -4.0]]
    assert compress(rows, 1.0).equal(rows)


@pytest.mark.parametrize("keep", [0.75, 0.5, 0.25, 0.1, 0.001])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 25)])
def test_compression_keeps_exactly_the_largest(
    keep: float, shape: tuple[int, int]
) -> None:
    rows = gradient(*shape).mul(2).round()  # few different magnitudes: many ties
    rows[rows == 0] = 0.25
    flat = rows.numpy().reshape(-1)
    order = np.lexsort((np.arange(flat.size), -np.abs(flat)))  # then by position
    kept = order[: math.ceil(keep * flat.size)]
    expected = np.zeros_like(flat)
    expected[kept] = flat[kept]
    found = compress(rows, keep)
    assert found.reshape(-1).tolist() == expected.tolist()
    assert zeros_without_sign(found)


def test_compression_by_row_keeps_the_largest_of_every_row() -> None:
    rows = torch.tensor([[9.0, -8.0, 7.0], [0.1, 0.3, -0.2]])
    kept = GradientCompression(keep=0.34, by_row=True)(rows, Batch("a", 1, 0))
    assert kept is not None
    torch.testing.assert_close(kept, torch.tensor([[9.0, -8.0, 0.0], [0.0, 0.3, -0.2]]))
    images = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    found = GradientCompression(keep=0.5, by_row=True)(images, Batch("a", 1, 0))
    assert found is not None and found.shape == images.shape
    assert (found != 0).flatten(1).sum(dim=1).tolist() == [3] * 4
    assert torch.equal(found[found != 0], images[found != 0])


def test_compression_of_an_all_equal_gradient() -> None:
    found = compress(torch.full((2, 5), -0.3), 0.5)
    assert (found != 0).reshape(-1).tolist() == [True] * 5 + [False] * 5
    assert compress(torch.zeros(2, 5), 0.5).tolist() == [[0.0] * 5] * 2


def test_a_share_is_read_as_a_decimal() -> None:
    assert 0.07 * 100 > 7
    assert int(torch.count_nonzero(compress(gradient(10, 10), 0.07))) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_laplace_noise(dtype: torch.dtype) -> None:
    rows = torch.full((1000, 200), 5.0, dtype=dtype)
    found = NoisyGradients(0.3)(rows, Batch("passive-1", 1, 0))
    assert found is not None and found.dtype == dtype
    noise = (found - rows).double().numpy().reshape(-1)
    error = math.sqrt(2 * 0.3**2 / noise.size)
    assert abs(noise.mean()) < 4 * error
    assert noise.var() == pytest.approx(2 * 0.3**2, rel=0.02)
    assert np.abs(noise).mean() == pytest.approx(0.3, rel=0.02)
    assert stats.kstest(noise, stats.laplace(scale=0.3).cdf).pvalue > 0.01
    beyond = (np.abs(noise) > 3.0).mean()  # the tail: exp(-10)
    assert 0 < beyond < 4 * math.exp(-10)


@pytest.mark.parametrize(
    ("dtype", "words", "expected"),
    [
        (torch.float32, [0, 1], [32, 31]),
        (torch.float32, [2**30, 2**31 - 1], [1, 0]),
        (torch.float32, [0, -(2**30)], [32, -1]),
        (torch.float64, [0, 1], [64, 63]),
        (torch.float64, [-(2**63), -(2**62)], [0, -1]),
    ],
)
def test_laplace_noise_of_given_bits(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    words: list[int],
    expected: list[int],
) -> None:
    """In units of log 2. Bits that are all zero do not give an infinite number."""

    def fill(self: Noise, count: int, kind: torch.dtype) -> Tensor:
        return torch.tensor(words, dtype=kind)

    monkeypatch.setattr(Noise, "integers", fill)
    found = laplace((2,), 1.0, dtype, stream())
    assert (found / math.log(2)).tolist() == pytest.approx(expected, abs=1e-6)


def test_laplace_noise_of_any_length() -> None:
    for length in (0, 1, 2, 3, 4097):
        found = laplace((length,), 1.0, torch.float32, stream())
        assert found.shape == (length,)
        assert len(found.unique()) >= 0.99 * length
    assert laplace((), 1.0, torch.float64, stream()).shape == ()


def test_buckets_by_hand() -> None:
    rows = torch.tensor([[0.004, -0.016, 0.05], [-0.2, 0.0249, -0.0049]])
    found = quantize(rows, 6, 0.03)  # steps of 0.01
    expected = [0.0, -0.02, 0.03, -0.03, 0.02, 0.0]
    assert found.reshape(-1).tolist() == pytest.approx(expected)
    assert zeros_without_sign(found)


@pytest.mark.parametrize("bins", [2, 3, 5, 6, 12, 17, 18, 24])
@pytest.mark.parametrize("bound", [0.03, 1e-3, 1.0])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1e6])
def test_buckets(bins: int, bound: float, scale: float) -> None:
    rows = gradient(50, 40).double().mul(scale)
    rows[0, :2] = torch.tensor([bound, -bound])
    found = quantize(rows, bins, bound)
    step = 2 * bound / bins
    assert len(found.unique()) <= bins + 1
    assert found.abs().max() <= bound * (1 + 1e-12)
    multiples = found.numpy() / step
    assert np.allclose(multiples, np.rint(multiples))
    inside = rows.abs() <= bound
    assert ((found - rows)[inside].abs() <= step / 2 * (1 + 1e-9)).all()
    outermost = bins // 2 * step
    assert np.allclose(found[~inside].abs().numpy(), outermost)
    assert (found * rows >= 0).all()


def test_selective_sharing_without_noise_by_hand() -> None:
    rows = torch.tensor([[2e-5, -5e-4, 0.5], [-0.5, 9e-5, 2e-4]])
    found = share_selected(rows, 1.0, stream(), sensitivity=0.0)
    expected = [0.0, -5e-4, 1e-3, -1e-3, 0.0, 2e-4]  # above 1e-4, clamped to ±1e-3
    assert found.reshape(-1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("theta", [0.75, 0.5, 0.25, 0.1, 0.01])
@pytest.mark.parametrize("shape", [(1, 1), (5, 6), (64, 32)])
def test_selective_sharing_leaves_at_most_its_share(
    theta: float, shape: tuple[int, int]
) -> None:
    most = math.floor(theta * shape[0] * shape[1])
    counts = []
    for seed in range(60):
        found = share_selected(gradient(*shape, seed), theta, stream(seed))
        assert found.abs().max() <= 0.001
        assert zeros_without_sign(found)
        counts.append(int(torch.count_nonzero(found)))
    assert max(counts) == most  # reached when the threshold happens to be low
    if theta >= 0.5 and most > 10:
        assert min(counts) < most  # and not when it happens to be high


def test_selective_sharing_out_of_candidates_is_not_the_gradient() -> None:
    rows = torch.full((4, 5), 5e-5)
    rows[0, 0] = 2e-4  # the only one above the threshold, where ten may pass
    found = share_selected(rows, 0.5, stream(), sensitivity=0.0)
    assert torch.count_nonzero(found) == 1
    assert found[0, 0] == pytest.approx(2e-4)


def test_selective_sharing_chooses_at_random() -> None:
    rows = torch.ones(5, 4)
    chosen = torch.zeros(5, 4)
    for seed in range(2000):
        shared = share_selected(rows, 0.25, stream(seed), sensitivity=0.0) != 0
        assert int(shared.sum()) == 5
        chosen += shared
    assert stats.chisquare(chosen.reshape(-1).numpy()).pvalue > 0.01


def test_noise_of_selective_sharing() -> None:
    """Scales of the three kinds of noise, from the paper's formulas."""
    eps, sensitivity, most, above = 1.8, 0.02, 4, 0.1
    test_scale = 2 * most * sensitivity / (8 / 9 * eps)
    value_scale = 2 * most * sensitivity / (2 / 9 * eps)
    rows = torch.full((2, 2), above, dtype=torch.float64)
    settings = {"eps": eps, "sensitivity": sensitivity, "gamma": 100.0, "tau": 0.0}
    found = torch.stack(
        [share_selected(rows, 1.0, stream(seed), **settings) for seed in range(6000)]
    )
    passes, _ = integrate.quad(
        lambda threshold: (
            stats.laplace.pdf(threshold, scale=test_scale)
            * stats.laplace.sf(threshold - above, scale=2 * test_scale)
        ),
        -np.inf,
        np.inf,
    )
    shared = (found != 0).double()
    assert float(shared.mean()) == pytest.approx(passes, abs=0.01)
    # One threshold for the whole gradient: whether entries pass is correlated.
    both = float((shared[:, 0, 0] * shared[:, 1, 1]).mean())
    assert both > passes**2 + 0.02
    noise = (found[found != 0] - above).numpy()
    assert stats.kstest(noise, stats.laplace(scale=value_scale).cdf).pvalue > 0.01


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientCompression(0.0), "keep must be above 0 and at most 1, got 0"),
        (lambda: GradientCompression(1.5), "keep"),
        (lambda: GradientCompression(math.nan), "keep"),
        (lambda: NoisyGradients(-1.0), "scale must be a number from 0, got -1"),
        (lambda: NoisyGradients(math.inf), "scale"),
        (lambda: MultiBucket(1), "bins must be at least 2, got 1"),
        (lambda: MultiBucket(6, 0.0), "bound"),
        (lambda: MultiBucket(6, math.nan), "bound"),
        (lambda: PPDL(0.0), "theta"),
        (lambda: PPDL(0.5, eps=0.0), "eps"),
        (lambda: PPDL(0.5, sensitivity=-1.0), "sensitivity"),
        (lambda: PPDL(0.5, gamma=0.0), "gamma"),
        (lambda: PPDL(0.5, tau=-1.0), "tau"),
    ],
)
def test_parameters_that_cannot_work(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]
