"""The canary audit: never above a bound that holds, above one that does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import Tensor

from flower_vfl.leakage.canaries import Canaries, epsilon_low
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor

COUNT, WIDTH, EPOCHS = 800, 6, 15


def audit(
    keep: float, seed: int = 0, anew: bool = False, noise: float = 0.3
) -> dict[str, float]:
    """Audit a training that sees labels which are kept with a probability."""
    stream = torch.Generator().manual_seed(seed)
    sides = (torch.rand(COUNT, generator=stream) < 0.5).long()
    share = 0.5 + 0.2 * torch.randn(COUNT, 1, generator=stream)
    rows = torch.arange(COUNT) * 2 + 7
    monitor = LeakageMonitor(Leakage(("stale",)), "binary")
    monitor.canaries = Canaries(rows, sides)

    def randomised() -> Tensor:
        flipped = torch.rand(COUNT, generator=stream) > keep
        return torch.where(flipped, 1 - sides, sides)

    used = randomised()
    for epoch in range(1, EPOCHS + 1):
        used = randomised() if anew else used
        clean = (share - used.unsqueeze(1)) * torch.ones(WIDTH)
        seen = clean + noise * torch.randn(COUNT, WIDTH, generator=stream)
        given = {"a": seen[:, :4], "b": seen[:, 4:]}
        told = {"rows": rows, "last": epoch == EPOCHS}
        found = monitor.measure(given, given, sides, epoch, **told)
    audited = [each for each in found if each.metric.startswith("canary")]
    assert {each.party for each in audited} == {"a+b"}
    return {each.metric: each.value for each in audited}


def test_the_lower_bound_is_that_of_clopper_and_pearson() -> None:
    low = beta.ppf(0.001, 90, 11)
    assert epsilon_low(90, 100) == pytest.approx(math.log(low / (1 - low)))
    assert epsilon_low(0, 100) == 0.0
    assert 0.0 < epsilon_low(100, 100) < 10.0


@pytest.mark.parametrize("keep", [0.9, 0.75])
def test_a_bound_that_holds_is_not_exceeded(keep: float) -> None:
    found = [audit(keep, seed) for seed in range(8)]
    epsilon = math.log(keep / (1 - keep))
    assert all(each["canary_epsilon"] <= epsilon for each in found)
    assert np.mean([each["canary_auc"] for each in found]) == pytest.approx(
        keep, abs=0.02
    )
    lows = [each["canary_auc_low"] for each in found]
    assert keep - 0.08 < np.mean(lows) < keep
    for each in found:
        odds = math.exp(each["canary_epsilon"])
        assert each["canary_auc_low"] == pytest.approx(odds / (1 + odds))


def test_new_draws_in_every_epoch_exceed_the_bound() -> None:
    for seed in range(3):
        assert audit(0.75, seed, anew=True)["canary_auc_low"] > 0.77


def test_noise_tells_nothing() -> None:
    found = [audit(0.5, seed) for seed in range(8)]
    aucs = [each["canary_auc"] for each in found]
    assert np.mean(aucs) == pytest.approx(0.5, abs=0.02)
    assert all(each["canary_epsilon"] == 0.0 for each in found)


def test_too_few_canaries_say_nothing() -> None:
    monitor = LeakageMonitor(Leakage(("stale",)), "binary")
    monitor.canaries = Canaries(torch.tensor([1, 900]), torch.tensor([1, 0]))
    rows, labels = torch.arange(20), torch.arange(20) % 2
    given = {"a": torch.randn(20, 3)}
    found = monitor.measure(given, given, labels, 1, rows=rows, last=True)
    assert {each.metric for each in found} == {"leak", "leak_flipped"}
