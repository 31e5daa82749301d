"""Privacy-Preserving Deep Learning (Shokri and Shmatikov, CCS 2015).

https://doi.org/10.1145/2810103.2813687. A baseline of Label Inference Attacks Against
Vertical Federated Learning (Fu et al., USENIX Security 2022).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from flower_vfl.errors import require
from flower_vfl.randomness import Noise
from flower_vfl.rows import RowTransform
from flower_vfl.transform import Batch

from .noisy_gradients import laplace


def share_selected(
    rows: Tensor,
    theta: float,
    stream: Noise,
    eps: float = 1.8,
    sensitivity: float = 1.0,
    gamma: float = 0.001,
    tau: float = 1e-4,
) -> Tensor:
    """Share at most c = ⌊θ·n⌋ entries whose noisy magnitude passes a noisy threshold.

    With σ(x) = 2·c·sensitivity/x, ε₁ = 8ε/9 and ε₂ = 2ε/9, an entry w passes if
    |bound(w)| + Lap(2σ(ε₁)) ≥ τ + Lap(σ(ε₁)), where bound clamps to ±γ. Of those that
    pass, c are chosen at random and become bound(w + Lap(σ(ε₂))). All other entries
    are zero.

    The paper draws new noise for the threshold after each entry that passes. Here it is
    drawn once, so that all entries are tested at once, which is as private (Lyu et al.,
    Understanding the Sparse Vector Technique, VLDB 2017, algorithm 1).
    """
    flat = rows.reshape(-1)
    shared = torch.zeros_like(flat)
    most = math.floor(Fraction(str(theta)) * len(flat))
    test_scale = 2.0 * most * sensitivity / (eps * 8.0 / 9.0)
    value_scale = 2.0 * most * sensitivity / (eps * 2.0 / 9.0)
    threshold = laplace((1,), test_scale, flat.dtype, stream).add_(tau)
    test = laplace(flat.shape, 2.0 * test_scale, flat.dtype, stream).to(rows.device)
    magnitude = test.add_(flat.abs().clamp_max_(gamma))
    passed = torch.nonzero(magnitude >= threshold.to(rows.device)).squeeze(1)
    if len(passed) > most:
        passed = passed[stream.permutation(len(passed))[:most].to(rows.device)]
    noise = laplace(passed.shape, value_scale, flat.dtype, stream).to(rows.device)
    shared[passed] = noise.add_(flat[passed]).clamp_(-gamma, gamma)
    return shared.reshape(rows.shape)


@dataclass(eq=False)
class PPDL(RowTransform):
    """Share a few noisy entries, chosen at random among the large ones.

    With the published settings the noise is far larger than γ, so nearly every shared
    entry is γ or −γ at random.

    Parameters
    ----------
    theta : float (default: 0.5)
        Largest fraction of the entries that are shared.
    eps : float (default: 1.8)
        Privacy budget of the whole gradient.
    sensitivity : float (default: 1.0)
        How much one example can change an entry.
    gamma, tau : float (default: 0.001, 1e-4)
        Entries are clamped to ±gamma; tau is the threshold of their magnitude.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import PPDL
    >>> rows = torch.ones(10, 10)
    >>> shared = PPDL(theta=0.25)(rows, Batch("passive-1", step=1, seed=7))
    >>> print(f"{shared.count_nonzero()} entries, none above {shared.abs().max():.3f}")
    25 entries, none above 0.001
    """

    theta: float = 0.5
    eps: float = 1.8
    sensitivity: float = 1.0
    gamma: float = 0.001
    tau: float = 1e-4

    def __post_init__(self) -> None:
        share = self.theta
        require(0.0 < share <= 1.0, "theta", "above 0 and at most 1", share)
        for name, value in (("eps", self.eps), ("gamma", self.gamma)):
            require(0.0 < value < math.inf, name, "a positive number", value)
        for name, value in (("sensitivity", self.sensitivity), ("tau", self.tau)):
            require(0.0 <= value < math.inf, name, "a number from 0", value)

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the entries that are shared, and zeros."""
        return share_selected(rows, stream=batch.noise(), **vars(self))
