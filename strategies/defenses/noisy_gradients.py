"""Deep Leakage from Gradients (Zhu et al., NeurIPS 2019).

https://arxiv.org/abs/1906.08935. A baseline of Fu et al. (USENIX Security 2022).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flower_vfl.errors import require
from flower_vfl.randomness import Noise
from flower_vfl.rows import AdjustableTransform
from flower_vfl.transform import Batch


def laplace(
    shape: Sequence[int], scale: float, dtype: torch.dtype, stream: Noise
) -> Tensor:
    """Return finite numbers from Laplace(0, scale): ±log u with a uniform u."""
    signed = stream.signed(math.prod(shape), dtype)
    # The logarithm of 0 is infinite, so 0 becomes half of the smallest step.
    smallest = 2.0 ** -torch.finfo(dtype).bits
    noise = signed.abs().clamp_min_(smallest).log_().copysign_(signed)
    noise.mul_(min(scale, torch.finfo(dtype).max / 64))  # no number drawn is so large
    return noise.reshape(tuple(shape))


class NoisyGradients(AdjustableTransform):
    """Add Laplace noise of a fixed scale to every entry.

    Parameters
    ----------
    scale : float (default: 1e-3)
        Mean absolute value of the noise.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import NoisyGradients
    >>> rows = torch.zeros(1000, 100)
    >>> noise = NoisyGradients(0.5)(rows, Batch("passive-1", step=1, seed=7))
    >>> print(f"{noise.abs().mean():.2f}")
    0.50
    """

    def __init__(self, scale: float = 1e-3) -> None:
        require(0.0 <= scale < math.inf, "scale", "a number from 0", scale)
        self.scale = scale

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows with noise."""
        noise = laplace(rows.shape, self.scale * self.raised, rows.dtype, batch.noise())
        return noise.to(rows.device).add_(rows)
