"""What the leakage meter skips and refuses, coalitions, random gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from meter_cases import FOUR, case, leaks_of
from records_cases import by_name
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks import LeakageMeter


def test_one_class_is_skipped() -> None:
    gradient, labels = case()
    meter = LeakageMeter(FOUR)
    for same in (torch.zeros(200), torch.ones(200)):
        assert meter.measure({"a": gradient}, same, 1) == []
    found = meter.measure({"a": gradient}, labels, 3)
    assert {(each.step, each.party, each.layer) for each in found} == {(3, "a", "")}
    assert [each.attack for each in found] == [a for a in FOUR for _ in range(2)]
    assert [each.metric for each in found] == ["leak", "leak_flipped"] * 4
    # The cosine attack knows the only positive row: there is none left to find.
    one = torch.zeros(200)
    one[5] = 1
    assert list(leaks_of(meter, gradient, one, 4)) == ["norm", "mean", "median"]


def test_an_auc_of_zero_counts() -> None:
    gradient = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    labels = torch.tensor([1, 1, 0, 0])
    meter = LeakageMeter(("norm",))
    assert leaks_of(meter, gradient, labels, 1) == {"norm": 0.0}
    assert leaks_of(meter, gradient, labels, flipped=True) == {"norm": 1.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_names_the_party(bad: float) -> None:
    gradient, labels = case()
    broken = gradient.clone()
    broken[3, 1] = bad
    with pytest.raises(PartyError, match="party 'b', step 7: 1 numbers"):
        LeakageMeter().measure({"a": gradient, "b": broken}, labels, 7)
    with pytest.raises(PartyError, match=r"party 'a', step 7.*of a binary task"):
        leaks_of(LeakageMeter(), gradient, labels * 2, 7)
    with pytest.raises(PartyError, match="199 labels for 200 rows"):
        leaks_of(LeakageMeter(), gradient, labels[:-1], 7)
    with pytest.raises(
        PartyError, match=r"before the defense has the shape \(200, 5\)"
    ):
        leaks_of(LeakageMeter(), gradient, labels, 7, gradient[:, :5])


def test_a_coalition_sees_all_columns() -> None:
    gradient, labels = case(width=10)
    parts = {"a": gradient[:, :3], "b": gradient[:, 3:].reshape(200, 7, 1)}
    meter = LeakageMeter(FOUR)
    whole = leaks_of(LeakageMeter(FOUR), gradient, labels, 1)
    for clean in (parts, None):
        found = by_name(meter.measure(parts, labels, 1, clean, "", [["a", "b"]]))
        for name, value in whole.items():
            assert found[f"leak_{name}/a+b"] == pytest.approx(value, abs=1e-12)
    with pytest.raises(
        PartyError, match=r"'a\+b', step 3: its members' gradients have 200, 9 rows"
    ):
        given = {**parts, "b": gradient[:9]}
        meter.measure(given, labels, 3, coalitions=[["a", "b"]])


def test_all_at_once() -> None:
    gradient, labels = case(width=10)
    parts = {"a": gradient[:, :3], "b": gradient[:, 3:]}
    meter = LeakageMeter(FOUR, baseline=True)
    measured = meter.measure(parts, labels, 1, parts, "first", [["b", "a"]])
    assert {each.layer for each in measured} == {"first"}
    raws = [each for each in measured if each.metric in ("leak", "leak_random")]
    assert [each.party for each in raws[::4]] == ["a", "b", "b+a"] * 2
    assert [each.metric for each in raws] == ["leak"] * 12 + ["leak_random"] * 12
    found = by_name(measured)
    whole = leaks_of(LeakageMeter(FOUR), gradient, labels, 1)
    for name, value in whole.items():
        raw = found[f"leak_{name}@first/b+a"]
        assert raw == pytest.approx(value, abs=1e-12)
        assert found[f"leak_flipped_{name}@first/b+a"] == max(raw, 1 - raw)
    alone = by_name(LeakageMeter(FOUR).measure(parts, labels, 1))
    assert alone["leak_norm/b"] == found["leak_norm@first/b"]


def mean_of(attacks: tuple[str, ...], rows: int, width: int) -> dict[str, float]:
    """Return the mean baseline of some draws."""
    labels, stream = torch.arange(rows) % 2, torch.Generator().manual_seed(0)
    found = [
        leaks_of(
            LeakageMeter(attacks), torch.randn(rows, width, generator=stream), labels
        )
        for _ in range(40)
    ]
    return {name: float(np.mean([f[name] for f in found])) for name in attacks}


def test_random_gradients_tell_nothing() -> None:
    attacks = ("norm", "cosine", "mean:held_out=true", "median:held_out=true")
    # An AUC of 200 rows has a standard deviation of .04; of 40 draws .0065.
    for value in mean_of(attacks, 200, 32).values():
        assert abs(value - 0.5) < 0.02


def test_centers_of_the_scored_rows_find_a_leak_in_noise() -> None:
    # The distance between two classes' scores is d/n1 + d/n0, their standard deviation
    # sqrt(d/n1 + d/n0): with 100 rows of each class and 32 columns, 0.8 apart.
    found = mean_of(("mean", "median"), 200, 32)
    expected = 0.5 * math.erfc(-0.8 / 2.0)
    assert found["mean"] == pytest.approx(expected, abs=0.02)
    assert found["median"] > 0.6
    # The papers' gradients with one column have no such trouble.
    assert abs(mean_of(("mean",), 200, 1)["mean"] - 0.5) < 0.05


def test_the_baseline_depends_on_the_seed_and_not_on_the_gradient() -> None:
    gradient, labels = case()

    def baseline(seed: int, given: Tensor) -> float:
        meter = LeakageMeter(("norm",), baseline=True, seed=seed)
        return by_name(meter.measure({"a": given}, labels, 1))["leak_random_norm/a"]

    assert baseline(3, gradient) == baseline(3, gradient * 2.0)
    assert baseline(3, gradient) != baseline(4, gradient)


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="unknown score attack 'nrom'; known: cosine"):
        LeakageMeter(("nrom",))
    with pytest.raises(ConfigError, match="unknown parameter 'soft'"):
        LeakageMeter(("mean:soft=true",))
    with pytest.raises(ConfigError, match="sample must be"):
        LeakageMeter(("median:sample=0",))
    with pytest.raises(ConfigError, match="unknown task"):
        LeakageMeter(task="ranking")  # type: ignore[arg-type]
    assert LeakageMeter().measure({}, torch.zeros(3), 1) == []
