"""Isotropic noise and the max-norm heuristic."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.randomness import Noise
from flower_vfl.strategies import Iso, MaxNorm
from flower_vfl.strategies.defenses.iso import iso
from flower_vfl.strategies.defenses.max_norm import max_norm
from flower_vfl.transform import Batch

DRAWS = 40_000
# Norms 5, 13, 0 and 0.5; the largest is 13.
ROWS = torch.tensor([[3.0, 4.0], [5.0, -12.0], [0.0, 0.0], [-0.3, 0.4]])


def stream(seed: int = 0) -> Noise:
    return Noise(seed)


def iso_draws(t: float) -> Tensor:
    """Return what Iso makes of the same rows many times over, draws × rows × d."""
    return iso(ROWS.repeat(DRAWS, 1), t, stream()).reshape(DRAWS, *ROWS.shape)


@pytest.mark.parametrize("t", [0.1, 1.0, 4.0])
def test_iso_adds_the_noise_of_the_paper(t: float) -> None:
    """E‖η‖² = t·max‖g‖², spread evenly over the coordinates, and E η = 0."""
    noise = (iso_draws(t) - ROWS).double()
    power = noise.square().sum(dim=2).mean(dim=0)
    assert power.tolist() == pytest.approx([t * 169.0] * 4, rel=0.02)
    found = iso_draws(t).double().square().sum(dim=2).mean(dim=0)
    expected = [t * 169.0 + own for own in (25.0, 169.0, 0.0, 0.25)]
    assert found.tolist() == pytest.approx(expected, rel=0.02)
    each = noise.reshape(-1, 2)
    assert each.var(dim=0).tolist() == pytest.approx([t * 169.0 / 2] * 2, rel=0.02)
    error = math.sqrt(t * 169.0 / 2 / len(each))
    assert (each.mean(dim=0).abs() < 4 * error).all()
    scaled = each[:, 0].numpy() / math.sqrt(t * 169.0 / 2)
    assert stats.kstest(scaled, "norm").pvalue > 0.01
    assert abs(torch.corrcoef(each.T)[0, 1]) < 4 / math.sqrt(len(each))


def test_iso_takes_the_largest_row_of_the_batch_and_not_of_the_gradient() -> None:
    rows = torch.zeros(20_000, 4)
    rows[0] = torch.tensor([2.0, 0.0, 0.0, 0.0])
    noise = iso(rows, 1.0, stream()) - rows
    assert float(noise.square().sum(dim=1).mean()) == pytest.approx(4.0, rel=0.02)


def test_max_norm_makes_expected_squared_norms_equal() -> None:
    found = max_norm(ROWS.repeat(DRAWS // 4, 1), stream()).double()
    found = found.reshape(-1, *ROWS.shape)
    power = found.square().sum(dim=2).mean(dim=0)
    # The second moment of a squared normal is heavy: 10⁴ draws give about 1.4 %.
    assert power[0] == pytest.approx(169.0, rel=0.05)
    assert power[1] == pytest.approx(169.0, rel=1e-6)  # the largest stays as it is
    assert power[2] == 0.0  # a row of zeros stays zero
    assert power[3] == pytest.approx(169.0, rel=0.05)


def test_max_norm_expected_squared_norm_to_two_percent() -> None:
    """One row many times in one batch, beside the largest one."""
    many = 100_000
    rows = torch.cat([torch.tensor([[5.0, -12.0]]), ROWS[:1].repeat(many, 1)])
    found = max_norm(rows, stream())[1:].double()
    power = float(found.square().sum(dim=1).mean())
    assert power == pytest.approx(169.0, rel=0.02)
    mean = found.mean(dim=0)  # unbiased
    error = torch.tensor([3.0, 4.0]).double() * math.sqrt(169 / 25 - 1) / many**0.5
    assert ((mean - torch.tensor([3.0, 4.0])).abs() < 4 * error).all()


def test_max_norm_stays_on_the_line_of_each_row() -> None:
    found = max_norm(ROWS, stream(3))
    crossed = found[:, 0] * ROWS[:, 1] - found[:, 1] * ROWS[:, 0]
    assert crossed.abs().max() < 1e-4
    again = max_norm(torch.cat([ROWS, ROWS[:1]]), stream(3))
    factors = again[[0, 4], 0] / 3.0
    assert factors[0] != factors[1]  # one number per row


def test_max_norm_by_hand() -> None:
    noise = stream(7).normal((4,), torch.float64).float()
    sigma = torch.tensor([math.sqrt(169 / 25 - 1), 0.0, 0.0, math.sqrt(169 / 0.25 - 1)])
    expected = ROWS * (1 + sigma * noise)[:, None]
    assert torch.allclose(max_norm(ROWS, stream(7)), expected, rtol=1e-5)


def test_both_use_the_generator_of_the_batch() -> None:
    batch = Batch("passive-1", 3, 11)
    found = Iso(2.0)(ROWS, batch)
    assert found is not None and found.equal(
        iso(ROWS, 2.0, batch.with_digest(ROWS).noise())
    )
    found = MaxNorm()(ROWS, batch)
    assert found is not None and found.equal(
        max_norm(ROWS, batch.with_digest(ROWS).noise())
    )


def test_no_noise_on_rows_whose_norm_overflows() -> None:
    rows = torch.full((2, 4), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert iso(rows, 0.0, stream()).equal(rows)


@pytest.mark.parametrize("t", [-1.0, math.inf, math.nan])
def test_iso_refuses_what_is_no_ratio(t: float) -> None:
    with pytest.raises(ConfigError, match="t must be a number from 0"):
        Iso(t)
