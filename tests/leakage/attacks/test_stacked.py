"""Leaks of many parties at once are those of each party by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_vfl.errors import PartyError
from flower_vfl.leakage.attacks.stacked import stacked_leaks
from flower_vfl.leakage.auc import Pair
from flower_vfl.leakage.meter import LeakageMeter
from flower_vfl.leakage.monitor import FOR_A_LIMIT
from flower_vfl.simulations.cli import scale

ATTACKS = (
    "norm",
    "median:sample=20",
    "mean:held_out=true",
    "cosine",
    "mean",
    "median:held_out=true",
    "median",
)
WHOLE = tuple(attack for attack in ATTACKS if "held_out" not in attack)
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


def measure(
    meter: LeakageMeter,
    noisy: dict[str, Tensor],
    labels: Tensor,
    clean: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Compare stacked with single gradients; return how many were stacked."""
    stacked = []

    def count(*given: Any) -> dict[int, list[Pair]]:
        found = stacked_leaks(*given)
        stacked.append(len(found))
        return found

    monkeypatch.setattr("flower_vfl.leakage.meter.stacked_leaks", count)
    together = meter.measure(noisy, labels, 1, clean)
    monkeypatch.setattr("flower_vfl.leakage.meter.stacked_leaks", lambda *given: {})
    alone = meter.measure(noisy, labels, 1, clean)
    assert [each.name for each in together] == [each.name for each in alone]
    values = [[each.value for each in found] for found in (together, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-9)
    return stacked[0]


@pytest.mark.parametrize("defended", [False, True])
def test_stacked_leaks_are_those_of_single_gradients(
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
    given = noisy, labels, clean, monkeypatch
    assert measure(meter, *given) == 2 * PARTIES  # and their random gradients


@pytest.mark.parametrize("layout", ["parts", "one", "apart", "reversed", "uneven"])
def test_large_gradients_are_stacked_in_single_precision(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = torch.Generator().manual_seed(3)
    labels = torch.randint(2, (ROWS,), generator=stream)
    whole = torch.randn(ROWS, 3 * 500 + 7, generator=stream) * (1 + labels[:, None])
    parts = [whole[:, start : start + 500] for start in (0, 500, 1000)]
    if layout == "one":  # that of a sum
        parts = parts[:1] * 3
    elif layout == "apart":
        parts = [part.clone() for part in parts]
    elif layout == "reversed":
        parts.reverse()
    elif layout == "uneven":
        parts[2] = whole[:, 1007:1507]
    found = {f"bank-{number}": part for number, part in enumerate(parts)}
    stacked = measure(LeakageMeter(ATTACKS), found, labels, found, monkeypatch)
    assert stacked == 3


@pytest.mark.parametrize("kind", ["a row of zeros", "close together"])
def test_what_needs_double_precision_is_measured_by_itself(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, labels = gradients(500)
    if kind == "close together":
        found["bank-3"] = 1.0 + 1e-4 * found["bank-3"]
    else:
        found["bank-3"][4] = 0.0
    given = found, labels, found, monkeypatch
    assert measure(LeakageMeter(ATTACKS), *given) < PARTIES


@pytest.mark.parametrize("attacks", [("mean:held_out=true",), ATTACKS[2:4], ATTACKS])
@pytest.mark.parametrize("rows", [2, 3, 5, 40])
def test_classes_of_a_few_rows(
    attacks: tuple[str, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = gradients()
    few = {name: gradient[:rows] for name, gradient in found.items()}
    labels = torch.arange(rows) % 5 == 1  # one row of class 1, or a few
    given = few, labels, {}, monkeypatch
    assert measure(LeakageMeter(attacks), *given) == PARTIES


def test_a_gradient_that_is_not_finite_is_named() -> None:
    found, labels = gradients()
    found["bank-7"][3, 1] = torch.nan
    with pytest.raises(PartyError, match="bank-7"):
        LeakageMeter(("norm",)).measure(found, labels, 1)


@pytest.mark.parametrize("attacks", [scale.DEFAULT.attack.split(","), FOR_A_LIMIT])
def test_the_attacks_of_a_run_are_stacked(
    attacks: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, labels = gradients()
    given = found, labels, {}, monkeypatch
    assert measure(LeakageMeter(attacks), *given) == PARTIES


# Not of halves: a row that is the center of the other one is at a distance of rounding.
@pytest.mark.parametrize("attacks", [WHOLE, ("norm",), ("cosine",), ("mean", "norm")])
@pytest.mark.parametrize("width", [1, 3, 500])
def test_scores_with_ties(
    attacks: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, labels = gradients(width)
    ties = {name: each.round(decimals=0) + 0.5 for name, each in found.items()}
    given = ties, labels, {}, monkeypatch
    assert measure(LeakageMeter(attacks), *given) == PARTIES


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [3, 500])
def test_other_precisions(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, labels = gradients(width)
    noisy = {name: each.to(dtype) for name, each in found.items()}
    clean = {name: (2.0 * each).to(dtype) for name, each in found.items()}
    given = noisy, labels, clean, monkeypatch
    assert measure(LeakageMeter(ATTACKS), *given) == PARTIES


@pytest.mark.parametrize("positives", [1, ROWS - 1])
def test_a_class_with_one_row(positives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = gradients()
    labels = (torch.arange(ROWS) < positives).long()
    measure(LeakageMeter(ATTACKS), found, labels, {}, monkeypatch)


@pytest.mark.parametrize(
    "attack", ["mean:hard=true", "median:split=batch", "mean:sums=true", "spectral"]
)
def test_other_attacks_run_one_by_one(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, labels = gradients()
    given = found, labels, {}, monkeypatch
    assert measure(LeakageMeter(("norm", attack)), *given) == 0
