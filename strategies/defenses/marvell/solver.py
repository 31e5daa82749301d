"""Label Leakage and Protection in Two-party Split Learning (Li et al., ICLR 2022).

https://arxiv.org/abs/2102.08504. Marvell's optimisation problem without tensors: the
four variables of Theorem 2, and the least power that keeps a bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from flower_vfl.errors import require


@dataclass(frozen=True)
class MarvellSolution:
    """Variances of the noise of both classes, and the divergence they achieve.

    Parameters
    ----------
    lambda1_neg, lambda2_neg : float
        Variance for the negative class along the line through both class means, and in
        every direction orthogonal to it.
    lambda1_pos, lambda2_pos : float
        The same for the positive class.
    sum_kl : float
        Sum of both Kullback-Leibler divergences between the classes with this noise.

    Examples
    --------
    >>> from flower_vfl.strategies import MarvellSolution
    >>> MarvellSolution(4.0, 0.0, 2.0, 1.0, sum_kl=0.5).swapped().lambda1_neg
    2.0
    """

    lambda1_neg: float
    lambda2_neg: float
    lambda1_pos: float
    lambda2_pos: float
    sum_kl: float

    def swapped(self) -> MarvellSolution:
        """Return the solution for exchanged classes."""
        positive = self.lambda1_pos, self.lambda2_pos
        negative = self.lambda1_neg, self.lambda2_neg
        return MarvellSolution(*positive, *negative, self.sum_kl)


def solve_marvell(
    u: float, v: float, d: int, q: float, p: float, power: float
) -> MarvellSolution:
    """Return the noise of a given power that hides the label best.

    This solves equation 15 of the paper by a search over one variable. ``sum_kl`` is
    infinite if nothing is hidden, e.g. without power for classes without spread.

    Parameters
    ----------
    u, v : float
        Variance per coordinate of the negative and of the positive rows.
    d : int
        Number of columns.
    q : float
        Squared distance between the class means.
    p : float
        Fraction of positive rows, from 0 to 1.
    power : float
        Expected squared norm of a row's noise, averaged over the rows.

    Examples
    --------
    >>> from flower_vfl.strategies import solve_marvell
    >>> solution = solve_marvell(u=0.2, v=0.2, d=8, q=1.0, p=0.5, power=4.0)
    >>> print(f"{solution.lambda1_pos:.4f} {solution.sum_kl:.6f}")
    4.0000 0.238095
    """
    _check(d, p, u=u, v=v, q=q, power=power)
    shift = _shift(u, v, q, power)
    u, v, q, rest = (math.ldexp(amount, shift) for amount in (u, v, q, power))
    if u > v:
        return _Problem(v, u, d, q, p, 1.0 - p, rest).solution(shift).swapped()
    return _Problem(u, v, d, q, 1.0 - p, p, rest).solution(shift)


def allowed_sum_kl(auc: float) -> float:
    """Return the divergence whose `composed_auc` is a given AUC."""
    require(0.5 < auc < 1.0, "auc", "above 0.5 and below 1", auc)
    excess = 2.0 * auc - 1.0
    return (2.0 * excess / (1.0 + math.sqrt(1.0 - excess))) ** 2


def least_power(u: float, v: float, d: int, q: float, p: float, auc: float) -> float:
    """Return the least power with which no attack can exceed a given AUC."""
    _check(d, p, u=u, v=v, q=q)
    allowed = allowed_sum_kl(auc)
    shift = _shift(u, v, q)
    u, v, q = (math.ldexp(amount, shift) for amount in (u, v, q))
    # Noise that makes both covariances equal leaves q/variance: this power suffices.
    enough = max((1.0 - p) * d * (v - u), p * d * (u - v))
    enough += max(q / allowed - max(u, v), 0.0)

    def divergence(power: float) -> float:
        return solve_marvell(u, v, d, q, p, power).sum_kl

    return _back(lowest(divergence, allowed, enough), shift)


def lowest(
    divergence: Callable[[float], float], allowed: float, enough: float
) -> float:
    """Return the least power for which a divergence that falls with it is allowed."""

    def slack(power: float) -> float:
        reached = divergence(power)
        if reached == math.inf:
            return -1.0
        return (allowed - reached) / (allowed + reached)  # bounded, nearly linear

    return crossing(slack, 0.0, enough * (1.0 + 1e-9), 1e-12)


def _check(d: int, p: float, **amounts: float) -> None:
    """Raise an error about amounts that no batch can have."""
    for name, amount in amounts.items():
        require(0.0 <= amount < math.inf, name, "a finite number from 0", amount)
    require(0.0 <= p <= 1.0, "p", "between 0 and 1", p)
    require(1 <= d < 2**53 and d == int(d), "d", "a whole number from 1", d)


def _shift(*amounts: float) -> int:
    """Return the power of two that scales amounts up without overflow."""
    return 900 - math.frexp(max(amounts))[1]


def _back(amount: float, shift: int) -> float:
    """Undo a shift; an overflow becomes the largest float."""
    try:
        return math.ldexp(amount, -shift)
    except OverflowError:
        return sys.float_info.max


@dataclass(frozen=True)
class _Problem:
    """The problem for u ≤ v, where λ2 of the wider class is 0.

    For a given x = λ2 of the narrow class the other two variables have a closed form:
    the divergence depends on the ratio r of the variances along the line of the means
    only through r·(1 + q·wide/K) + (1 + q·narrow/K)/r, K as below.
    """

    u: float
    v: float
    d: int
    q: float
    narrow: float  # weights of the two classes
    wide: float
    power: float

    def first(self, x: float) -> tuple[float, float, float]:
        """Return λ1 of the narrow and the wide class, and their distance."""
        u, q, narrow, wide = self.u, self.q, self.narrow, self.wide
        gap = self.v - u
        rest = max(self.power - narrow * (self.d - 1) * x, 0.0)
        total = rest + wide * self.v + narrow * u  # K
        if total == 0.0:
            return rest, rest, gap
        ratio = math.sqrt(total + narrow * q) / math.sqrt(total + wide * q)
        more = ratio - 1.0
        if 0.5 < ratio < 2.0:  # the same without cancellation
            more = (narrow - wide) * q / (total + wide * q) / (1.0 + ratio)
        shift = gap - u * more
        weight = narrow + wide * ratio
        first_wide = rest * (ratio / weight) - shift * (narrow / weight)
        if first_wide < 0.0:
            first_narrow = rest / narrow
            return first_narrow, 0.0, gap - first_narrow
        first_narrow = rest / weight + shift * (wide / weight)
        if first_narrow < 0.0:
            first_wide = rest / wide
            return 0.0, first_wide, gap + first_wide
        return first_narrow, first_wide, (u + first_narrow) * more

    def pull(self, x: float) -> float:
        """Return how far x is below its optimum u + x = v/sqrt(1 + t), t as below."""
        narrow, wide, apart = self.first(x)
        a0, a1 = self.u + narrow, self.v + wide
        if a0 == 0.0:  # underflow: x is too large
            return -self.v
        inner = max(apart / a0 * (1.0 + a0 / a1) + self.q / a0, 0.0)
        t = self.v / a0 * inner
        if t < 1.0:  # the two forms differ in what they cancel
            root = math.sqrt(1.0 + t)
            return (self.v - self.u - x) - self.v * t / (root * (1.0 + root))
        root = math.sqrt(self.v / a0) * math.sqrt(inner) * math.sqrt(1.0 + 1.0 / t)
        return self.v / root - self.u - x

    def second(self) -> float:
        """Return λ2 of the narrow class."""
        cost, gap = self.narrow * self.d, self.v - self.u
        most = gap if self.power >= cost * gap else self.power / cost  # as λ2 ≤ λ1
        if self.d == 1 or most == 0.0:
            return 0.0
        return crossing(self.pull, most, 0.0, 4.0 * sys.float_info.epsilon)

    def solution(self, shift: int) -> MarvellSolution:
        """Return the best noise, the narrow class as the negative one."""
        x = self.second()
        narrow, wide, apart = self.first(x)
        a0, a1 = self.u + narrow, self.v + wide
        c0, c1 = self.u + x, self.v
        sum_kl = (
            _divergence(self.v - self.u - x, c0, c1, self.d - 1)
            + _divergence(apart, a0, a1)
            + 0.5 * (_over(self.q, a0) + _over(self.q, a1))
        )
        first, second = _back(max(narrow, x), shift), _back(x, shift)
        return MarvellSolution(first, second, _back(wide, shift), 0.0, sum_kl)


def _over(a: float, b: float) -> float:
    """Return a/b, with 0/0 = 0, the limit of equal variances."""
    if b == 0.0:
        return math.inf if a > 0.0 else 0.0
    return a / b


def _divergence(apart: float, a: float, b: float, times: int = 1) -> float:
    """Return (a/b + b/a)/2 − 1 without its cancellation, for b = a ± apart."""
    apart = abs(apart)
    return times * (0.5 * _over(apart, a) * _over(apart, b)) if times and apart else 0.0


def crossing(
    function: Callable[[float], float], below: float, above: float, tolerance: float
) -> float:
    """Return a root of a function with one sign change, from its non-negative side.

    Chandrupatla's method: inverse quadratic interpolation or bisection.
    """
    b, fb, a, fa = below, function(below), above, function(above)
    if fb >= 0.0:
        return below
    if fa <= 0.0:
        return above
    t = 0.5
    for _ in range(80):  # rounding may leave no better point to find
        x = a + t * (b - a)
        fx = function(x)
        if (fx < 0.0) == (fa < 0.0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        width, least = abs(b - a), tolerance * max(a, b)
        if fa == 0.0 or width <= 2.0 * least:
            break
        t = 0.5
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        if phi * phi < xi and (1.0 - phi) * (1.0 - phi) < 1.0 - xi:
            t = fa / (fb - fa) * fc / (fb - fc)
            t += (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        t = min(max(t, least / width), 1.0 - least / width)
    return a if fa >= 0.0 else b
