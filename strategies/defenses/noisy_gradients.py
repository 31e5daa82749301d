"""Deep Leakage from Gradients (Zhu et al., NeurIPS 2019).

https://arxiv.org/abs/1906.08935. A baseline of Label Inference Attacks Against Vertical
Federated Learning (Fu et al., USENIX Security 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flower_vfl.transform import Batch

from .base import AdjustableTransform, require


def laplace(
    shape: Sequence[int], scale: float, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return numbers drawn from Laplace(0, scale).

    Made of random bits: one for the sign, the others for a uniform number u, and −log u
    is exponential. That takes a quarter of the time of torch's ``exponential_`` on a
    CPU. Drawn on the generator's device; always finite.
    """
    length = math.prod(shape)
    bits = torch.finfo(dtype).bits
    words = torch.empty(
        math.ceil(length * bits / 64), dtype=torch.int64, device=generator.device
    ).random_(-(2**63), None, generator=generator)
    integers = words.view(torch.int32 if bits == 32 else torch.int64)[:length]
    signed = integers.to(dtype)
    unit = 2.0 ** (1 - bits)  # makes 1 of the largest integer
    # The logarithm of 0 is infinite: half of the smallest step instead.
    noise = signed.abs().mul_(unit).clamp_min_(unit / 2).log_().copysign_(signed)
    noise.mul_(min(scale, torch.finfo(dtype).max / 64))  # no number drawn is so large
    return noise.reshape(tuple(shape))


class NoisyGradients(AdjustableTransform):
    """Laplace noise on every entry, the same whatever the gradient's size.

    Parameters
    ----------
    scale : float (default: 1e-3)
        Mean absolute value of the noise.
    """

    def __init__(self, scale: float = 1e-3) -> None:
        require(0.0 <= scale < math.inf, "scale", "a number from 0", scale)
        self.scale = scale

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows with noise."""
        noise = laplace(
            rows.shape, self.scale * self.raised, rows.dtype, batch.generator()
        )
        return noise.to(rows.device).add_(rows)
