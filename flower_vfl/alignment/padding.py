"""Dummy ids, which blur the size of the intersection.

A dummy that only one party adds would blur nothing: it enlarges that party's list and
the union by one each. So all parties know one pool of ``2 * padding`` dummy ids, and
each adds a secret half of it, drawn for this session. The number of dummies that two
parties share is then random, with mean ``padding / 2`` and a standard deviation of
about ``sqrt(padding / 8)``, and neither party can know it.

The size of the intersection that a party sees in a private set union of two, shared
dummies included, is (ε, δ)-differentially private for one id of the other party, with
the δ of `padding_delta`. With three or more parties the same holds for every pair.

Limits: the number of ids of each party stays known (everybody can subtract the
padding), and the server sees the same blurred sizes. In an intersection each party
learns which of its own ids are shared in any case; there padding blurs the size for the
server alone, until training counts the rows. Dummies stay in the union and are trained
on with synthetic data. Every session draws again: repeating the handshake averages the
noise away.
"""

import math
import secrets

import numpy as np
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError


def dummy_messages(padding: int) -> list[bytes]:
    """Return a secret random half of the pool of dummy ids."""
    if padding < 0:
        raise ConfigError(f"padding must not be negative, got {padding}")
    chosen = secrets.SystemRandom().sample(range(2 * padding), padding)
    return [b"d" + (8).to_bytes(8, "big") + n.to_bytes(8, "big") for n in chosen]


def shared_dummies(padding: int) -> NDArray[np.float64]:
    """Return the probability of 0, 1, ..., `padding` shared dummies."""
    numbers = np.arange(1, 2 * padding + 1)
    factorial = np.append(0.0, np.log(numbers).cumsum())  # logarithms of 0!, 1!, ...
    own = factorial[padding] - factorial[: padding + 1] - factorial[padding::-1]
    every = factorial[-1] - 2 * factorial[padding]
    chances: NDArray[np.float64] = np.exp(2 * own - every)
    return chances


def padding_delta(padding: int, epsilon: float) -> float:
    """Return the δ for which the blurred size is (ε, δ)-differentially private.

    Parameters
    ----------
    padding : int
        Number of dummy ids of each party.
    epsilon : float
        ε, at least 0.

    Examples
    --------
    >>> print(f"{padding_delta(100, 0.5):.4f}")
    0.0056
    """
    if epsilon < 0:
        raise ConfigError(f"epsilon must not be negative, got {epsilon}")
    chances = np.append(shared_dummies(padding), 0.0)
    shifted = np.append(0.0, chances[:-1])  # one id more in the intersection
    excess = np.maximum(chances - math.exp(epsilon) * shifted, 0).sum()
    return float(min(1.0, excess))
