"""What releases of labels reveal together, against exact and simulated attackers."""

from __future__ import annotations

import itertools
import json
import math
import sys

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, stats
from sklearn.metrics import roc_auc_score

from flower_vfl import ConfigError
from flower_vfl.privacy.accountant import (
    Guarantee,
    Release,
    compose,
    composed_auc,
    guarantee_of_run,
)

RESPONSE = "randomised-response"
Losses = NDArray[np.float64]


def response(epsilon: float, classes: int = 2) -> Release:
    return Release(RESPONSE, epsilon=epsilon, classes=classes)


def laplace(epsilon: float) -> Release:
    return Release("laplace", epsilon=epsilon)


def gaussian(mu: float) -> Release:
    return Release("gaussian", mu=mu, delta=1e-6)


def losses(release: Release, rng: np.random.Generator, side: int, n: int) -> Losses:
    """Return the log-likelihood ratios of draws for a label of 0 or 1."""
    if release.mechanism == "gaussian":
        mu = release.amount
        return mu * (rng.normal(size=n) + mu * side) - mu * mu / 2
    epsilon = release.amount
    if release.mechanism == "laplace":
        drawn = rng.laplace(size=n) / epsilon + side
        return epsilon * np.clip(2.0 * drawn - 1.0, -1.0, 1.0)
    keep = math.exp(epsilon) / (math.exp(epsilon) + release.classes - 1)
    kept = rng.random(n) < keep
    other = rng.integers(1, release.classes, size=n)  # 1 is the other of the two
    said = np.where(kept, 0, other)  # 0: the label itself
    sign = np.where(said == 0, 1.0, np.where(said == 1, -1.0, 0.0))
    return epsilon * sign * (1 if side else -1)


def attacked(releases: list[Release], n: int = 200_000) -> float:
    """Return the AUC of the best attacker on simulated draws."""
    rng = np.random.default_rng(1)
    scores = [
        np.sum([losses(each, rng, side, n) for each in releases], axis=0)
        for side in (0, 1)
    ]
    return float(roc_auc_score(np.repeat([0, 1], n), np.concatenate(scores)))


@pytest.mark.parametrize(
    "releases",
    [
        [response(0.62)],
        [laplace(1.3)],
        [gaussian(0.9)],
        [response(0.3), response(0.3)],
        [response(1.0), response(0.5), response(0.2)],
        [laplace(0.7), laplace(0.7)],
        [gaussian(0.5), gaussian(1.0)],
        [response(0.8), gaussian(0.7)],
        [response(0.6), laplace(0.5), gaussian(0.3)],
        [response(0.4)] * 12,
    ],
    ids=lambda rs: "+".join(f"{r.mechanism[:3]}{r.amount}" for r in rs)[:40],
)
def test_the_bound_is_that_of_the_best_attacker(releases: list[Release]) -> None:
    found = attacked(releases)
    _, _, bound = compose(releases)
    assert found <= bound + 0.003  # four standard errors
    assert bound <= found + 0.004  # and no looser than it must be


def test_more_classes_never_reveal_more() -> None:
    many = [response(1.0, classes=10), response(0.7, classes=10)]
    assert attacked(many) < compose(many)[2] + 0.003


@pytest.mark.parametrize("epsilons", [(0.3, 1.1), (1.0, 1.0, 2.0), (0.1,) * 6])
def test_responses_agree_with_an_enumeration(epsilons: tuple[float, ...]) -> None:
    worlds = []
    for side in (0, 1):
        chances = {}
        for said in itertools.product((0, 1), repeat=len(epsilons)):
            keep = [1 / (1 + math.exp(-e)) for e in epsilons]
            same = zip(keep, said, strict=True)
            chances[said] = math.prod(k if s == side else 1 - k for k, s in same)
        worlds.append(chances)
    ratios = {said: worlds[1][said] / worlds[0][said] for said in worlds[0]}
    auc = sum(
        worlds[1][a] * worlds[0][b] * (0.5 + 0.5 * np.sign(ratios[a] - ratios[b]))
        for a in ratios
        for b in ratios
        if not math.isclose(ratios[a], ratios[b]) or a == b
    )
    auc += sum(
        worlds[1][a] * worlds[0][b] * 0.5
        for a in ratios
        for b in ratios
        if a != b and math.isclose(ratios[a], ratios[b])
    )
    epsilon, delta, bound = compose([response(each) for each in epsilons])
    assert (epsilon, delta) == (pytest.approx(sum(epsilons)), 0.0)
    assert auc - 1e-9 <= bound <= auc + 1e-3


def test_a_delta_buys_a_smaller_epsilon() -> None:
    twelve = [response(0.4)] * 12
    epsilon, delta, auc = compose(twelve, delta=1e-3)
    assert delta == 1e-3
    assert 3.0 < epsilon < 4.7 < compose(twelve)[0]
    assert auc == compose(twelve)[2]


def test_one_gaussian_is_the_exact_curve() -> None:
    mu, delta = 1.3, 1e-5
    epsilon, _, auc = compose([Release("gaussian", mu=mu, delta=delta)])
    inside = stats.norm.cdf(mu / 2 - epsilon / mu)
    outside = math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert inside - outside == pytest.approx(delta, rel=1e-6)
    assert auc == pytest.approx(stats.norm.cdf(mu / math.sqrt(2)))
    several = [Release("gaussian", mu=each, delta=delta) for each in (0.5, 1.2)]
    assert compose(several) == pytest.approx((epsilon, delta, auc))


def test_one_laplace_is_the_integral() -> None:
    def density(x: float) -> float:
        return float(stats.laplace.pdf(x) * stats.laplace.cdf(x + 1.7))

    exact = sum(integrate.quad(density, *ends)[0] for ends in ((-40, 0), (0, 40)))
    assert compose([laplace(1.7)])[2] == pytest.approx(exact, abs=1e-6)


def test_a_gaussian_needs_a_delta() -> None:
    with pytest.raises(ConfigError, match="delta above 0"):
        compose([Release("gaussian", mu=1.0)])


def test_without_the_library_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    assert compose([response(1.0)])[0] == 1.0
    with pytest.raises(ConfigError, match=r"pip install 'flower-vfl\[privacy\]'"):
        compose([response(1.0), response(1.0)])


@pytest.mark.parametrize(
    "given",
    [
        {"mechanism": "gaussian", "epsilon": 1.0},
        {"mechanism": RESPONSE, "mu": 1.0},
        {"mechanism": RESPONSE, "epsilon": -1.0},
        {"mechanism": RESPONSE, "epsilon": math.inf},
        {"mechanism": "laplace", "epsilon": "1"},
        {"mechanism": "marvell", "epsilon": 1.0},
        {"mechanism": RESPONSE, "epsilon": 1.0, "delta": 1.0},
    ],
)
def test_a_release_that_is_not_known_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Release(**given)  # type: ignore[arg-type]


def test_marvell_adds_up() -> None:
    assert composed_auc([]) == 0.5
    assert composed_auc([1.0]) == composed_auc([0.25] * 4) == 0.875
    assert composed_auc([2.0, 2.0]) == composed_auc([math.inf]) == 1.0


def test_what_a_run_states() -> None:
    none, private = Guarantee("none"), Guarantee.of([response(1.0)])
    assert guarantee_of_run(none, {}) == none
    assert guarantee_of_run(private, {}) == private
    marvell = guarantee_of_run(none, {"a": 0.5, "b": 1.0})
    assert (marvell.mechanism, marvell.auc_bound) == ("marvell", 0.875)
    assert "one passive party alone" in marvell.scope
    assert "independent from epoch to epoch" in marvell.scope
    both = guarantee_of_run(private, {"a": 1.0})
    assert (both.mechanism, both.others) == (RESPONSE, (marvell,))
    for sums in ({"a": 5.0}, {"a": math.inf, "b": 0.1}):
        spent = guarantee_of_run(none, sums)
        assert (spent.mechanism, spent.auc_bound) == ("none", 1.0)
        assert [each.auc_bound for each in spent.others] == [1.0]


def test_the_sentences() -> None:
    private = Guarantee.of([response(math.log(0.65 / 0.35))])
    line = private.sentence
    assert line.startswith("randomised response, epsilon 0.619: over the whole")
    assert line.endswith("an AUC above 0.650")
    normal = Guarantee.of([Release("gaussian", mu=1.0, delta=1e-5)])
    assert "epsilon 4.38, delta 1e-05:" in normal.sentence
    marvell = guarantee_of_run(Guarantee("none"), {"a": 1.0}).sentence
    assert marvell.startswith(
        "under Marvell's assumptions, no attack by a single passive"
    )
    assert "0.875" in marvell
    assert guarantee_of_run(private, {"a": 1.0}).sentence == f"{line}; {marvell}"
    spent = guarantee_of_run(Guarantee("none"), {"a": 5.0}).sentence
    assert spent.startswith("no bound for the whole training; Marvell's bounds")


def test_a_statement_travels_as_text() -> None:
    both = guarantee_of_run(Guarantee.of([response(1.0)]), {"a": 1.0})
    assert Guarantee.from_text(both.to_text()) == both
    assert Guarantee.from_text("") == Guarantee("none")


@pytest.mark.parametrize(
    "change",
    [
        {"nothing": 1},
        {"auc_bound": "0.5"},
        {"auc_bound": math.nan},
        {"epsilon": math.inf},
        {"epsilon": None},
        {"mechanism": 1},
        {"scope": None},
        {"others": [1]},
        {"others": None},
    ],
)
def test_a_malformed_statement_is_refused(change: dict[str, object]) -> None:
    entries = json.loads(Guarantee.of([response(1.0)]).to_text())
    for text in (json.dumps({**entries, **change}), "[]", "{", "1"):
        with pytest.raises(ConfigError, match="label privacy"):
            Guarantee.from_text(text)
