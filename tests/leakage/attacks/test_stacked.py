"""Scores of many parties at once are those of each party by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flower_vfl.errors import PartyError
from flower_vfl.leakage.attacks import stacked
from flower_vfl.leakage.meter import LeakageMeter

ATTACKS = ("norm", "cosine", "mean", "median", "mean:hard=true", "median:held_out=true")
PARTIES, ROWS = 9, 40


def gradients(width: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    stream = torch.Generator().manual_seed(2)
    labels = torch.randint(2, (ROWS,), generator=stream)
    shape = ROWS, width
    found = {
        f"bank-{i}": torch.randn(shape, generator=stream) * (1 + labels[:, None])
        for i in range(PARTIES)
    }
    return found, labels


@pytest.mark.parametrize("defended", [False, True])
def test_stacked_scores_find_what_single_ones_find(
    defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy, labels = gradients()
    clean = {
        name: g + 0.1 * g.roll(1, 0) if defended else g for name, g in noisy.items()
    }
    if defended:
        clean["bank-4"][:20] = 0.0  # its known example is another row
    noisy["bank-1"] = noisy["bank-2"] * 1e-20  # squares vanish
    noisy["bank-0"], clean["bank-0"] = noisy["bank-0"][:, :2], clean["bank-0"][:, :2]
    meter = LeakageMeter(ATTACKS, baseline=True)
    scored = []

    def count(*given: object) -> object:
        scored.append(found := original(*given))  # type: ignore[arg-type]
        return found

    original = stacked.stacked_scores
    monkeypatch.setattr("flower_vfl.leakage.meter.stacked_scores", count)
    together = meter.measure(noisy, labels, 1, clean)
    # All but the one of another width, and their random gradients.
    assert len(scored[0]) >= PARTIES - 1
    monkeypatch.setattr(stacked, "_LEAST", 10**6)
    alone = meter.measure(noisy, labels, 1, clean)
    assert scored[1] == {}
    assert [each.name for each in together] == [each.name for each in alone]
    values = [[each.value for each in found] for found in (together, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-9)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    found, labels = gradients()
    found["bank-7"][3, 1] = torch.nan
    with pytest.raises(PartyError, match="bank-7"):
        LeakageMeter(("norm",)).measure(found, labels, 1)
