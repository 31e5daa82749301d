"""Leakage as a setting, and the watch that measures and compares with a limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from leak_cases import flower_warnings
from records_cases import by_name
from scipy.stats import pearsonr
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.parties.checkpoints import from_bytes, to_bytes

ROWS, WIDTH = 60, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(seed: int = 5) -> Tensor:
    return (draw(ROWS, seed=seed) > 0.3).float()


def long_rows(target: Tensor, share: float, seed: int) -> Tensor:
    """Return rows that are longer for a positive label, in a share of the cases."""
    told = torch.rand(len(target), generator=torch.Generator().manual_seed(seed))
    length = torch.where(told < share, 1.0 + target, 1.5 + 0.1 * told)
    rows = draw(len(target), WIDTH, seed=seed + 1000)
    return rows / rows.norm(dim=1, keepdim=True) * length[:, None]


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    with flower_warnings() as found:
        yield found


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"action": "shout"}, "unknown action 'shout'"),
        ({"limit": 0.0}, "between 0 and 1"),
        ({"limit": 1.2}, "between 0 and 1"),
        ({"limit": float("nan")}, "between 0 and 1"),
        ({"window": 0}, "window and every are at least 1"),
        ({"factor": 1.0}, "a factor more than 1"),
        ({"action": "stop"}, "the action 'stop' needs a leak limit"),
        ({"action": "raise"}, "the action 'raise' needs a leak limit"),
    ],
)
def test_settings_that_cannot_be_meant(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Leakage(**values)


def test_settings_survive_a_message() -> None:
    leakage = Leakage(
        attacks=("norm", "mean:hard=true"),
        limit=0.7,
        action="raise",
        window=3,
        factor=1.5,
        coalitions=("a+b", "all"),
        baseline=True,
        layers=True,
    )
    assert Leakage.from_text(leakage.to_text()) == leakage
    assert Leakage.from_text(Leakage().to_text()) == Leakage()
    assert json.loads(leakage.to_text())["limit"] == 0.7


@pytest.mark.parametrize(
    ("coalition", "problem"),
    [
        ("a+x", "unknown party of a coalition 'x'"),
        ("a", "two different parties or more"),
        ("a+a", "two different parties or more"),
        ("a+b+a", "two different parties or more"),
    ],
)
def test_coalitions_that_cannot_be(coalition: str, problem: str) -> None:
    leakage = Leakage(coalitions=("a+b", coalition))
    with pytest.raises(ConfigError, match=problem):
        leakage.check_parties(["a", "b", "c"])


def test_coalitions_that_can_be() -> None:
    Leakage(coalitions=("a+b", "b + c", "all")).check_parties(["a", "b", "c"])
    with pytest.raises(ConfigError, match="two different parties or more"):
        Leakage(coalitions=("all",)).check_parties(["a"])


def test_binary_values_are_those_of_scikit_learn() -> None:
    target = labels()
    given = {
        "a": long_rows(target, 0.5, 1),
        "b": draw(ROWS, 2, seed=2) - 0.5 * target[:, None],
    }
    watch = LeakageMonitor(Leakage(attacks=("norm", "mean")), "binary")
    found = by_name(watch.measure(given, given, target, 4))
    y = target.numpy()
    for party, gradient in given.items():
        rows = gradient.double().numpy()
        norm = roc_auc_score(y, np.linalg.norm(rows, axis=1))
        away, near = (
            np.linalg.norm(rows - rows[y == c].mean(axis=0), axis=1) for c in (0, 1)
        )
        mean = roc_auc_score(y, away - near)
        for attack, auc in (("norm", norm), ("mean", mean)):
            assert found[f"leak_{attack}/{party}"] == pytest.approx(auc, abs=1e-9)
            flipped = found[f"leak_flipped_{attack}/{party}"]
            assert flipped == pytest.approx(max(auc, 1 - auc), abs=1e-9)
    assert found["leak_norm/a"] > 0.7 and found["leak_mean/b"] > 0.6
    assert len(found) == 2 * 2 * 2


def test_classes_and_values() -> None:
    classes = torch.arange(ROWS) % 3
    rows = draw(ROWS, WIDTH) + torch.nn.functional.one_hot(classes, 3)
    watch = LeakageMonitor(Leakage(attacks=("norm",)), "multiclass")
    found = by_name(watch.measure({"a": rows}, {"a": rows}, classes, 1))
    norms = rows.double().norm(dim=1).numpy()
    aucs = [roc_auc_score(classes.numpy() == c, norms) for c in range(3)]
    assert found["leak_norm/a"] == pytest.approx(np.mean(aucs), abs=1e-9)
    flipped = np.mean([max(auc, 1 - auc) for auc in aucs])
    assert found["leak_flipped_norm/a"] == pytest.approx(flipped, abs=1e-9)

    values = draw(ROWS, seed=3)
    rows = draw(ROWS, WIDTH, seed=4) - values[:, None] * torch.tensor([0.1, 2.0, 0.0])
    watch = LeakageMonitor(Leakage(), "regression")
    found = by_name(watch.measure({"a": rows}, {"a": rows}, values, 1))
    rho = [pearsonr(rows[:, i].numpy(), values.numpy()).statistic for i in range(WIDTH)]
    assert found["leak_direct/a"] == pytest.approx(rho[1], abs=1e-6)
    assert found["leak_flipped_direct/a"] == pytest.approx(-rho[1], abs=1e-6)


def test_regression_with_parties_of_different_widths_and_a_coalition() -> None:
    values = draw(ROWS, seed=3)
    given = {
        "a": draw(ROWS, 2, seed=4) + values[:, None],
        "b": draw(ROWS, 5, seed=5),
    }
    watch = LeakageMonitor(Leakage(coalitions=("all",)), "regression")
    found = by_name(watch.measure(given, given, values, 1))
    other = LeakageMonitor(Leakage(), "regression")
    alone = by_name(other.measure({"b": given["b"]}, {}, values, 1))
    assert found["leak_direct/b"] == pytest.approx(alone["leak_direct/b"])
    sizes = {p: found[f"leak_flipped_direct/{p}"] for p in ("a", "b", "a+b")}
    assert sizes["a+b"] == pytest.approx(max(sizes["a"], sizes["b"]))


def test_one_class_is_skipped_and_nothing_is_nothing() -> None:
    watch = LeakageMonitor(Leakage(limit=0.6, window=1), "binary")
    rows = {"a": draw(ROWS, WIDTH)}
    assert watch.measure(rows, rows, torch.ones(ROWS), 1) == []
    assert watch.measure({}, rows, labels(), 1) == []
    assert watch.state_dict()["recent"] == []


@pytest.mark.parametrize("width", [WIDTH, 500])
def test_late_measurements_are_those_of_their_steps(width: int) -> None:
    settings = Leakage(("norm", "cosine", "mean", "median", "spectral"))
    steps = []
    for step in range(1, 21):
        rows = ROWS - (step == 13)  # a batch of another size
        target = labels()[:rows].roll(step)
        gradient = draw(rows, width, seed=step) * (1 + target[:, None])
        steps.append(({"a": gradient, "b": gradient[:, :3].clone()}, target, step))
    at_once = LeakageMonitor(settings, "binary")
    expected = [at_once.measure(g, {}, y, step) for g, y, step in steps]
    watch = LeakageMonitor(settings, "binary")
    found = []
    for number, (gradients, target, step) in enumerate(steps):
        given = gradients, {}, target, step
        found.append(watch.measure(*given, late=number < 19))
        if number == 10:  # after a restart
            state = watch.state_dict()
            watch = LeakageMonitor(settings, "binary")
            watch.load_state_dict(state)
    assert sum(map(bool, found)) < 6 and found[-1]
    both = (chain.from_iterable(each) for each in (found, expected))
    for one, other in zip(*both, strict=True):
        assert one[2:] == other[2:] and one.value == pytest.approx(other.value)


def test_a_limit_acts_at_its_step(warnings: list[str]) -> None:
    target = labels()
    rows = {"a": long_rows(target, 1.0, 0)}
    watch = LeakageMonitor(Leakage(("norm",), limit=0.6, window=1), "binary")
    found = watch.measure(rows, rows, target, 1, late=True)
    assert {each.step for each in found} == {1}
    assert by_name(found)["leak_limit/a"] > 0.6
    assert len(warnings) == 1


def test_an_error_names_the_step() -> None:
    rows = {"a": torch.full((ROWS, WIDTH), torch.nan)}
    watch = LeakageMonitor(Leakage(), "binary")
    assert watch.measure(rows, rows, labels(), 7, late=True) == []
    with pytest.raises(PartyError, match="party 'a', step 7"):
        watch.measure({}, {}, labels(), 8, last=True)


def test_coalitions_pool_what_is_there() -> None:
    target = labels()
    given = {name: draw(ROWS, WIDTH, seed=i) for i, name in enumerate("abc")}
    settings = Leakage(attacks=("mean",), coalitions=("c + a", "all"))
    watch = LeakageMonitor(settings, "binary")
    measured = watch.measure(given, given, target, 1)
    found = by_name(measured)
    assert {each.party for each in measured} == {*"abc", "c+a", "a+b+c"}
    both = torch.cat([given["c"], given["a"]], dim=1)
    expected = by_name(watch.measure({"x": both}, {}, target, 1))["leak_mean/x"]
    assert found["leak_mean/c+a"] == pytest.approx(expected, abs=1e-12)

    del given["a"]  # its gradient was withheld
    measured = watch.measure(given, given, target, 2)
    assert {each.party for each in measured} == {"b", "c", "b+c"}


def test_random_gradients_beside_the_real_ones() -> None:
    target = labels()
    settings = Leakage(attacks=("norm", "cosine"), baseline=True, limit=0.51, window=1)
    watch = LeakageMonitor(settings, "binary")
    real = long_rows(target, 1.0, 3)
    by_step = [
        by_name(watch.measure({"a": real}, {"a": real}, target, step))
        for step in range(1, 101)
    ]
    for attack in ("norm", "cosine"):
        values = [found[f"leak_random_{attack}/a"] for found in by_step]
        assert np.mean(values) == pytest.approx(0.5, abs=0.03)
        assert np.std(values) > 0.02  # drawn anew at every step
    assert by_step[0]["leak_norm/a"] == 1.0
    limits = {name for found in by_step for name in found if "limit" in name}
    assert limits == {"leak_limit/a"}


def test_the_limit_looks_at_the_average_of_a_window(warnings: list[str]) -> None:
    target = labels()
    watch = LeakageMonitor(Leakage(("norm",), limit=0.7, window=4), "binary")
    exceeded, aucs = [], []
    for step in range(1, 13):
        rows = long_rows(target, 0.7, step)
        found = by_name(watch.measure({"a": rows}, {"a": rows}, target, step))
        aucs.append(found["leak_norm/a"])
        if "leak_limit/a" in found:
            exceeded.append(step)
            assert found["leak_limit/a"] == pytest.approx(np.mean(aucs[-4:]))
    assert exceeded == [4, 8, 12]  # a full window each, and once per window
    assert len(warnings) == 3
    for words in ("step 4", "norm attack", "'a'", "over 4 steps", "limit is 0.700"):
        assert words in warnings[0]


def test_an_auc_below_one_half_is_a_leak_too() -> None:
    target = labels()
    watch = LeakageMonitor(Leakage(("norm",), limit=0.7, window=2), "binary")
    for step in (1, 2):
        rows = long_rows(1 - target, 0.9, step)
        found = by_name(watch.measure({"a": rows}, {"a": rows}, target, step))
        assert found["leak_norm/a"] < 0.3
    assert found["leak_limit/a"] > 0.7


def test_chance_is_not_flipped_before_the_average() -> None:
    """Each batch is far from one half, to one side and to the other in turn."""
    target = labels()
    watch = LeakageMonitor(Leakage(("norm",), limit=0.6, window=2), "binary")
    for step in range(1, 9):
        rows = long_rows(target if step % 2 else 1 - target, 1.0, step)
        found = by_name(watch.measure({"a": rows}, {"a": rows}, target, step))
        assert found["leak_flipped_norm/a"] == 1.0
        assert "leak_limit/a" not in found


def test_the_sign_of_a_correlation_does_not_matter_to_the_limit() -> None:
    """The best column may have one sign in one batch and the other in the next."""
    values = draw(ROWS, seed=3)
    watch = LeakageMonitor(Leakage(("direct",), limit=0.6, window=4), "regression")
    for step in range(1, 5):
        sign = 1.0 if step % 2 else -1.0
        rows = draw(ROWS, WIDTH, seed=step)
        rows[:, step % 3] += sign * 3 * values
        found = by_name(watch.measure({"a": rows}, {"a": rows}, values, step))
        assert found["leak_direct/a"] * sign > 0.8
    assert found["leak_limit/a"] > 0.8


def test_the_worst_attack_of_each_party_is_reported(warnings: list[str]) -> None:
    target = labels()
    watch = LeakageMonitor(Leakage(("norm", "mean"), limit=0.6, window=1), "binary")
    given = {
        "far": draw(ROWS, WIDTH) + 3 * target[:, None],
        "long": long_rows(target, 1.0, 1),
        "noise": torch.ones(ROWS, WIDTH),
    }
    found = by_name(watch.measure(given, given, target, 1))
    limits = {k: v for k, v in found.items() if k.startswith("leak_limit")}
    assert list(limits) == ["leak_limit/far", "leak_limit/long"]
    for party in ("far", "long"):
        worst = max(found[f"leak_{attack}/{party}"] for attack in ("norm", "mean"))
        assert limits[f"leak_limit/{party}"] == worst
    assert "mean attack on the gradients of 'far'" in warnings[0]
    assert "norm attack on the gradients of 'long'" in warnings[1]


def test_the_window_survives_a_restart() -> None:
    target = labels()

    def make() -> LeakageMonitor:
        return LeakageMonitor(Leakage(("norm",), limit=0.7, window=4), "binary")

    first = make()
    for step in (1, 2, 3):
        rows = long_rows(target, 0.9, step)
        first.measure({"a": rows}, {"a": rows}, target, step)
    second = make()
    second.load_state_dict(from_bytes(to_bytes(first.state_dict())))
    rows = long_rows(target, 0.9, 4)
    expected = first.measure({"a": rows}, {"a": rows}, target, 4)
    assert second.measure({"a": rows}, {"a": rows}, target, 4) == expected
    assert "leak_limit/a" in by_name(expected)
    fresh = make().measure({"a": rows}, {"a": rows}, target, 4)
    assert by_name(fresh).keys() < by_name(expected).keys()


def test_layers_are_named_and_those_without_rows_are_left_out() -> None:
    target = labels()
    given = {
        "0": draw(ROWS, 7),
        "conv": draw(ROWS, 2, 3, 3, seed=1) + target[:, None, None, None],
        "words": draw(2 * ROWS, 4, seed=2),  # two rows for each label
        "total": torch.tensor(1.0),
    }
    watch = LeakageMonitor(Leakage(("norm", "mean")), "binary")
    found = by_name(watch.measure_layers(given, target, 1, "a"))
    assert set(found) == {
        f"{kind}_{attack}@{layer}/a"
        for kind in ("leak", "leak_flipped")
        for attack in ("norm", "mean")
        for layer in ("0", "conv")
    }
    norms = given["conv"].flatten(1).norm(dim=1).numpy()
    expected = roc_auc_score(target.numpy(), norms)
    assert found["leak_norm@conv/a"] == pytest.approx(expected, abs=1e-9)


def test_an_attack_that_does_not_fit_names_party_and_step() -> None:
    watch = LeakageMonitor(Leakage(("direct",)), "binary")
    with pytest.raises(PartyError, match="direct attack") as caught:
        watch.measure({"a": draw(ROWS, 5)}, {}, labels(), 17)
    assert caught.value.step == 17
    with pytest.raises(ConfigError, match="unknown score attack 'nrom'"):
        LeakageMonitor(Leakage(("nrom",)), "binary")
    with pytest.raises(ConfigError, match="needs classes"):
        LeakageMonitor(Leakage(("cosine",)), "regression")


def test_steps_in_between_are_not_measured() -> None:
    watch = LeakageMonitor(Leakage(attacks=("norm",), every=3), "binary")
    gradient, labels = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    found = [
        bool(watch.measure({"a": gradient}, {"a": gradient}, labels, step))
        for step in range(1, 8)
    ]
    assert found == [False, False, True, False, False, True, False]
    with pytest.raises(ConfigError, match="at least 1"):
        Leakage(every=0)
