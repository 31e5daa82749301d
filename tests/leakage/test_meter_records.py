"""What the leakage meter keeps, skips and refuses, coalitions, random gradients."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from meter_cases import FOUR, case

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks import LeakageMeter


def test_one_class_is_skipped_and_counted() -> None:
    gradient, labels = case()
    meter = LeakageMeter(FOUR)
    for step, same in enumerate((torch.zeros(200), torch.ones(200)), start=1):
        assert meter.measure("a", gradient, same, step) == {}
    meter.measure("a", gradient, labels, 3)
    for name in FOUR:
        assert meter.skipped("a", name) == 2
        assert [step for step, _ in meter.series("a", name)] == [3]
    # The cosine attack knows the only positive row: there is none left to find.
    one = torch.zeros(200)
    one[5] = 1
    assert list(meter.measure("a", gradient, one, 4)) == ["norm", "mean", "median"]
    assert meter.skipped("a", "cosine") == 3


def test_an_auc_of_zero_counts() -> None:
    gradient = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    labels = torch.tensor([1, 1, 0, 0])
    meter = LeakageMeter(("norm",))
    assert meter.measure("a", gradient, labels, 1) == {"norm": 0.0}
    assert meter.series("a", "norm") == [(1, 0.0)]
    assert meter.series("a", "norm", flipped=True) == [(1, 1.0)]
    assert meter.skipped("a", "norm") == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_names_the_party(bad: float) -> None:
    gradient, labels = case()
    broken = gradient.clone()
    broken[3, 1] = bad
    with pytest.raises(PartyError, match="party 'b', step 7: 1 numbers"):
        LeakageMeter().measure_all({"a": gradient, "b": broken}, labels, 7)
    with pytest.raises(PartyError, match=r"party 'a', step 7.*of a binary task"):
        LeakageMeter().measure("a", gradient, labels * 2, 7)
    with pytest.raises(PartyError, match="199 labels for 200 rows"):
        LeakageMeter().measure("a", gradient, labels[:-1], 7)
    with pytest.raises(
        PartyError, match=r"before the defense has the shape \(200, 5\)"
    ):
        LeakageMeter().measure("a", gradient, labels, 7, gradient[:, :5])


def test_summary_and_state(tmp_path: Path) -> None:
    meter = LeakageMeter(("norm", "mean"))
    values = []
    for step in range(1, 21):
        gradient, labels = case(seed=step)
        values.append(meter.measure("a", gradient, labels, step)["norm"])
        meter.measure("a", gradient[:, :2], labels, step, layer="first")
    summary = meter.summary()["a"]["cut"]["norm"]
    flipped = [max(v, 1 - v) for v in values]
    assert summary == {
        "mean": pytest.approx(np.mean(values)),
        "last": values[-1],
        "max": max(values),
        "q95": pytest.approx(np.quantile(values, 0.95)),
        "flipped_mean": pytest.approx(np.mean(flipped)),
        "flipped_last": flipped[-1],
        "flipped_max": max(flipped),
        "flipped_q95": pytest.approx(np.quantile(flipped, 0.95)),
        "batches": 20,
        "skipped": 0,
    }
    torch.save(meter.state_dict(), tmp_path / "meter.pt")
    other = LeakageMeter(("norm", "mean"))
    other.load_state_dict(torch.load(tmp_path / "meter.pt", weights_only=True))
    assert other.summary() == meter.summary()
    assert set(other.summary()["a"]) == {"cut", "first"}
    gradient, labels = case(seed=30)
    other.measure("a", gradient, labels, 21)
    assert len(other.series("a", "norm")) == 21
    assert len(meter.series("a", "norm")) == 20


def test_a_coalition_sees_all_columns() -> None:
    gradient, labels = case(width=10)
    parts = {"a": gradient[:, :3], "b": gradient[:, 3:].reshape(200, 7, 1)}
    meter = LeakageMeter(FOUR)
    found = meter.measure_coalition(parts, labels, 1, parts)
    whole = LeakageMeter(FOUR).measure("a", gradient, labels, 1)
    assert found == whole
    assert list(meter.summary()) == ["a+b"]
    assert meter.measure_coalition(parts, labels, 2) == whole
    with pytest.raises(
        PartyError, match=r"'a\+b', step 3: its members' gradients have 200, 9 rows"
    ):
        meter.measure_coalition({**parts, "b": gradient[:9]}, labels, 3)


def test_all_at_once() -> None:
    gradient, labels = case(width=10)
    parts = {"a": gradient[:, :3], "b": gradient[:, 3:]}
    meter = LeakageMeter(FOUR, baseline=True)
    found = meter.pairs(parts, labels, 1, parts, coalitions=[["b", "a"]])
    names = ["a", "b", "b+a", "a/random", "b/random", "b+a/random"]
    assert list(found) == list(meter.summary()) == names
    whole = LeakageMeter(FOUR).measure("a", gradient, labels, 1)
    for name, (raw, flipped) in found["b+a"].items():
        assert raw == pytest.approx(whole[name], abs=1e-12)
        assert flipped == max(raw, 1 - raw)
    alone = LeakageMeter(FOUR, keep=False)
    assert alone.measure_all(parts, labels, 1)["b"]["norm"] == found["b"]["norm"][0]
    assert alone.summary() == {} and alone.series("b", "norm") == []


def mean_of(attacks: tuple[str, ...], rows: int, width: int) -> dict[str, float]:
    """Return the mean baseline of some draws."""
    labels, stream = torch.arange(rows) % 2, torch.Generator().manual_seed(0)
    found = [
        LeakageMeter(attacks).measure(
            "random", torch.randn(rows, width, generator=stream), labels, 0
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


def test_the_baseline_is_a_series_of_its_own() -> None:
    meter = LeakageMeter(("norm",), baseline=True, seed=3)
    gradient, labels = case()
    assert list(meter.measure_all({"a": gradient}, labels, 1)) == ["a"]
    assert set(meter.summary()) == {"a", "a/random"}
    again = LeakageMeter(("norm",), baseline=True, seed=3)
    again.measure_all({"a": gradient * 2.0}, labels, 1)
    assert again.series("a/random", "norm") == meter.series("a/random", "norm")


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="unknown score attack 'nrom'; known: cosine"):
        LeakageMeter(("nrom",))
    with pytest.raises(ConfigError, match="unknown parameter 'soft'"):
        LeakageMeter(("mean:soft=true",))
    with pytest.raises(ConfigError, match="sample must be"):
        LeakageMeter(("median:sample=0",))
    with pytest.raises(ConfigError, match="unknown task"):
        LeakageMeter(task="ranking")  # type: ignore[arg-type]
    assert LeakageMeter().measure_all({}, torch.zeros(3), 1) == {}
