"""Marvell's optimisation problem against scipy, hand-worked numbers and its limits."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from scipy.optimize import brentq, minimize

from flower_vfl import ConfigError
from flower_vfl.privacy.accountant import composed_auc
from flower_vfl.strategies.defenses.marvell.solver import (
    MarvellSolution,
    allowed_sum_kl,
    least_power,
    solve_marvell,
)

Problem = tuple[float, float, int, float, float, float]  # u, v, d, q, p, power


def lambdas(solution: MarvellSolution) -> np.ndarray:
    return np.array(
        [
            solution.lambda1_neg,
            solution.lambda2_neg,
            solution.lambda1_pos,
            solution.lambda2_pos,
        ]
    )


def literal(lam: np.ndarray, u: float, v: float, d: int, q: float) -> float:
    """The objective as METHODS.md writes it."""
    a0, c0, a1, c1 = lam + np.array([u, u, v, v])
    sides = (d - 1) * (c0 / c1 + c1 / c0) + (a0 + q) / a1 + (a1 + q) / a0
    return sides / 2 - d


def slopes(lam: np.ndarray, u: float, v: float, d: int, q: float) -> np.ndarray:
    a0, c0, a1, c1 = lam + np.array([u, u, v, v])
    return (
        np.array(
            [
                1 / a1 - (a1 + q) / a0**2,
                (d - 1) * (1 / c1 - c1 / c0**2),
                1 / a0 - (a0 + q) / a1**2,
                (d - 1) * (1 / c0 - c0 / c1**2),
            ]
        )
        / 2
    )


def prices(d: int, p: float) -> np.ndarray:
    """What a unit of each λ costs."""
    return np.array([1 - p, (1 - p) * (d - 1), p, p * (d - 1)])


def random_problem(stream: random.Random) -> Problem:
    def anywhere(decades: float) -> float:
        return 10 ** stream.uniform(-decades, decades)

    v = anywhere(2)
    u = stream.choice([anywhere(2), v, v * stream.uniform(0.9, 1.1)])
    q = anywhere(2)
    p = stream.choice([0.5, stream.uniform(0.01, 0.99), 10 ** stream.uniform(-4, -1)])
    return u, v, stream.choice([1, 2, 5, 32, 128, 1600]), q, p, q * anywhere(1.5)


def best_of_scipy(problem: Problem, stream: random.Random) -> float:
    """The least objective that SLSQP reaches on the four variables, of three starts."""
    u, v, d, q, p, power = problem
    cost = prices(d, p)
    even = power / cost.sum()
    starts = [np.full(4, even), np.array([power, 0, power, 0])]
    start = np.sort([stream.random() for _ in range(4)]).reshape(2, 2)[:, ::-1]
    starts.append(start.ravel() * power / (cost @ start.ravel()))
    best = math.inf
    for start in starts:
        found = minimize(
            lambda y: literal(y * even, u, v, d, q),
            start / even,
            jac=lambda y: slopes(y * even, u, v, d, q) * even,
            method="SLSQP",
            bounds=[(0, None)] * 4,
            constraints=[
                {"type": "eq", "fun": lambda y: cost @ y / cost.sum() - 1},
                {"type": "ineq", "fun": lambda y: np.array([y[0] - y[1], y[2] - y[3]])},
            ],
            options={"ftol": 1e-13, "maxiter": 80},
        )
        reached = np.maximum(found.x * even, 0)
        reached[[0, 2]] = np.maximum(reached[[0, 2]], reached[[1, 3]])
        if abs(cost @ reached / power - 1) < 1e-8:
            best = min(best, literal(reached, u, v, d, q))
    return best


def check_feasible(problem: Problem, solution: MarvellSolution) -> None:
    _, _, d, _, p, power = problem
    lam = lambdas(solution)
    assert np.all(np.isfinite(lam)) and np.all(lam >= 0)
    assert lam[0] >= lam[1] and lam[2] >= lam[3]
    assert prices(d, p) @ lam == pytest.approx(power, rel=1e-12)


def compare(count: int, seed: int) -> None:
    stream = random.Random(seed)
    compared = 0
    for _ in range(count):
        problem = random_problem(stream)
        solution = solve_marvell(*problem)
        check_feasible(problem, solution)
        exact = literal(lambdas(solution), *problem[:4])
        # The textbook form subtracts d from a sum of about d.
        noise = 1e-14 * problem[2]
        assert solution.sum_kl == pytest.approx(exact, rel=1e-10, abs=noise)
        best = best_of_scipy(problem, stream)
        compared += math.isfinite(best)
        assert solution.sum_kl <= best * (1 + 1e-6) + noise, problem
    assert compared > 0.9 * count


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ((1, 2, 100, 10, 0.1, 10), (2.357992, 0.0844134, 3.565759, 0, 21.650564)),
        ((0.5, 0.2, 32, 4, 0.25, 4), (1.742233, 0, 2.627544, 0.262766, 1.719183)),
        ((0.2, 0.2, 8, 1, 0.5, 4), (4, 0, 4, 0, 0.238095)),
    ],
)
def test_check_values(problem: Problem, expected: tuple[float, ...]) -> None:
    solution = solve_marvell(*problem)
    assert [*lambdas(solution), solution.sum_kl] == pytest.approx(expected, rel=1e-5)


MANY = [pytest.param(500, seed, marks=pytest.mark.extra) for seed in range(4)]


@pytest.mark.parametrize(("count", "seed"), [(50, 4), *MANY])
def test_never_worse_than_scipy(count: int, seed: int) -> None:
    compare(count, seed)


@pytest.mark.parametrize("factor", [2.0**-900, 1e-200, 1e-12, 1e12, 1e200, 2.0**900])
def test_has_no_scale(factor: float) -> None:
    stream = random.Random(2)
    for _ in range(50):
        u, v, d, q, p, power = random_problem(stream)
        plain = solve_marvell(u, v, d, q, p, power)
        scaled = solve_marvell(u * factor, v * factor, d, q * factor, p, power * factor)
        assert scaled.sum_kl == pytest.approx(plain.sum_kl, rel=1e-9)
        assert lambdas(scaled) / factor == pytest.approx(
            lambdas(plain), rel=1e-7, abs=1e-13 * power
        )


def test_classes_can_be_exchanged() -> None:
    stream = random.Random(3)
    for _ in range(50):
        u, v, d, q, p, power = random_problem(stream)
        one, other = (
            solve_marvell(u, v, d, q, p, power),
            solve_marvell(v, u, d, q, 1 - p, power),
        )
        assert other.sum_kl == pytest.approx(one.sum_kl, rel=1e-9)
        assert lambdas(other.swapped()) == pytest.approx(
            lambdas(one), rel=1e-6, abs=1e-9 * power
        )


def test_one_column_has_no_second_variance() -> None:
    solution = solve_marvell(1, 3, 1, 2, 0.25, 5)
    grid = np.linspace(0, 5 / 0.75, 200_001)
    other = (5 - 0.75 * grid) / 0.25
    values = ((grid + 3) / (other + 3) + (other + 5) / (grid + 1)) / 2 - 1
    assert solution.lambda2_neg == solution.lambda2_pos == 0
    assert solution.sum_kl == pytest.approx(values.min(), rel=1e-8)
    assert solution.lambda1_neg == pytest.approx(grid[values.argmin()], abs=1e-3)


def test_equal_means_take_isotropic_noise() -> None:
    # Nothing but the variances to hide: all d columns of the narrow class alike.
    solution = solve_marvell(1, 2, 4, 0, 0.5, 1)
    assert lambdas(solution) == pytest.approx([0.5, 0.5, 0, 0])
    assert solution.sum_kl == pytest.approx(4 * 0.5**2 / (2 * 1.5 * 2))
    enough = solve_marvell(1, 2, 4, 0, 0.5, 7)
    assert enough.sum_kl == 0
    assert enough.lambda2_neg == pytest.approx(1)


def test_no_spread_at_all_is_the_limit_of_a_little() -> None:
    limit = solve_marvell(0, 0, 16, 1, 0.3, 4)
    near = solve_marvell(1e-12, 1e-12, 16, 1, 0.3, 4)
    assert lambdas(limit) == pytest.approx(lambdas(near), rel=1e-9)
    assert limit.sum_kl == pytest.approx(near.sum_kl, rel=1e-9)
    even = solve_marvell(0, 0, 16, 1, 0.5, 4)
    assert lambdas(even) == pytest.approx([4, 0, 4, 0])
    assert even.sum_kl == pytest.approx(0.25)


def test_one_narrow_class_without_spread() -> None:
    solution = solve_marvell(0, 1, 64, 2, 0.5, 8)
    near = solve_marvell(1e-13, 1, 64, 2, 0.5, 8)
    assert solution.lambda2_neg > 0  # else the divergence is infinite
    assert solution.sum_kl == pytest.approx(near.sum_kl, rel=1e-9)


def test_a_class_without_rows_costs_nothing() -> None:
    solution = solve_marvell(1, 2, 10, 3, 1.0, 4)
    along = math.sqrt(6 * 9)  # minimises a/6 + (6 + 3)/a
    assert lambdas(solution) == pytest.approx([along - 1, 1, 4, 0])
    near = solve_marvell(1, 2, 10, 3, 1 - 1e-12, 4)
    assert lambdas(near) == pytest.approx(lambdas(solution), rel=1e-5)
    mirrored = solve_marvell(2, 1, 10, 3, 0.0, 4)
    assert lambdas(mirrored) == pytest.approx([4, 0, along - 1, 1])
    tiny = solve_marvell(2, 1, 10, 3, 1e-30, 4)
    assert lambdas(tiny) == pytest.approx(lambdas(mirrored))


def test_no_power_is_no_noise() -> None:
    solution = solve_marvell(1, 2, 3, 4, 0.5, 0)
    assert not lambdas(solution).any()
    assert solution.sum_kl == pytest.approx(3 * 1 / 4 + 4 / 2 * 1.5)
    assert solve_marvell(0, 0, 3, 4, 0.5, 0).sum_kl == math.inf
    assert solve_marvell(0, 1, 3, 0, 0.5, 0).sum_kl == math.inf
    assert solve_marvell(0, 0, 3, 0, 0.5, 0).sum_kl == 0


def test_huge_power_hides_everything() -> None:
    solution = solve_marvell(1, 2, 128, 3, 0.3, 1e30)
    assert solution.sum_kl == pytest.approx(3e-30, rel=1e-6)
    assert solution.lambda2_neg == pytest.approx(1)
    assert lambdas(solution)[[0, 2]] == pytest.approx(1e30)


def test_extremes_give_numbers() -> None:
    amounts = [0.0, 5e-324, 1e-310, 1e-150, 1e-20, 1.0, 1 + 1e-9, 1e20, 1e150, 1.7e308]
    fractions = [0.0, 5e-324, 1e-20, 0.5, 1 - 1e-16, 1.0]
    stream = random.Random(4)
    cases = list(itertools.product(amounts, amounts, amounts, amounts))
    for u, v, q, power in stream.sample(cases, 4000):
        d, p = stream.choice([1, 2, 128, 10**9]), stream.choice(fractions)
        solution = solve_marvell(u, v, d, q, p, power)
        lam = lambdas(solution)
        assert np.all(np.isfinite(lam)) and np.all(lam >= 0)
        assert lam[0] >= lam[1] and lam[2] >= lam[3]
        assert solution.sum_kl >= 0  # not NaN


@pytest.mark.parametrize(
    "wrong",
    [
        {"u": -1.0},
        {"v": math.nan},
        {"q": math.inf},
        {"power": -1e-9},
        {"p": 1.01},
        {"p": -0.01},
        {"p": math.nan},
        {"d": 0},
        {"d": 2.5},
        {"d": math.nan},
    ],
)
def test_refuses_what_is_no_problem(wrong: dict[str, float]) -> None:
    good = {"u": 1.0, "v": 2.0, "d": 4, "q": 1.0, "p": 0.5, "power": 1.0}
    solve_marvell(**good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        solve_marvell(**{**good, **wrong})  # type: ignore[arg-type]


def test_bound_of_the_auc() -> None:
    assert composed_auc([0]) == 0.5
    assert composed_auc([1]) == 0.875
    assert composed_auc([4]) == composed_auc([1e9]) == composed_auc([math.inf]) == 1
    for auc in (0.5000001, 0.6, 0.875, 0.999):
        assert composed_auc([allowed_sum_kl(auc)]) == pytest.approx(auc, rel=1e-12)


def test_least_power_is_the_least() -> None:
    stream = random.Random(5)
    for _ in range(200):
        *problem, _ = random_problem(stream)
        auc = stream.choice([0.51, 0.6, 0.75, 0.95])
        power = least_power(*problem, auc)
        assert composed_auc([solve_marvell(*problem, power).sum_kl]) <= auc * (
            1 + 1e-12
        )
        if power > 0:
            less = solve_marvell(*problem, power * (1 - 1e-6))
            assert composed_auc([less.sum_kl]) > auc


def test_least_power_agrees_with_brentq() -> None:
    problem = (1.0, 2.0, 100, 10.0, 0.1)
    target = allowed_sum_kl(0.7)
    root = brentq(lambda x: solve_marvell(*problem, x).sum_kl - target, 1, 1e4)
    assert least_power(*problem, 0.7) == pytest.approx(root, rel=1e-9)


def test_least_power_of_degenerate_problems() -> None:
    assert least_power(0, 0, 8, 0, 0.5, 0.6) == 0
    assert least_power(1, 1, 8, 0, 0.5, 0.6) == 0
    assert least_power(1, 1, 8, 1e-9, 0.5, 0.6) == 0
    # Equal classes without spread: q/P is the divergence.
    assert least_power(0, 0, 8, 3, 0.5, 0.6) == pytest.approx(3 / allowed_sum_kl(0.6))
    assert math.isfinite(least_power(1e300, 0, 128, 1e308, 0.01, 0.51))
    for auc in (0.5, 1.0, math.nan):
        with pytest.raises(ConfigError, match="auc"):
            least_power(1, 2, 8, 1, 0.5, auc)
