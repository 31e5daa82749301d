"""Transforms that papers compare their defenses with.

- `Iso`, `MaxNorm`: Label Leakage and Protection in Two-party Split Learning (Li et al.,
  ICLR 2022), https://arxiv.org/abs/2102.08504

The others are baselines of Label Inference Attacks Against Vertical Federated Learning
(Fu et al., USENIX Security 2022):

- `NoisyGradients`: Deep Leakage from Gradients (Zhu et al., NeurIPS 2019),
  https://arxiv.org/abs/1906.08935
- `GradientCompression`: Deep Gradient Compression (Lin et al., ICLR 2018),
  https://arxiv.org/abs/1712.01887
- `MultiBucket`: signSGD: Compressed Optimisation for Non-Convex Problems (Bernstein et
  al., ICML 2018), https://arxiv.org/abs/1802.04434, with more buckets (discrete SGD)
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import require
from flower_vfl.randomness import Noise
from flower_vfl.rows import AdjustableTransform, RowTransform, row_norms
from flower_vfl.transform import Batch


def iso(rows: Tensor, t: float, stream: Noise) -> Tensor:
    """Add N(0, t/d · max‖g‖² · I) to every row."""
    limit = torch.finfo(rows.dtype).max / 16  # no number drawn is that large
    largest = min(float(row_norms(rows).max()), limit)
    scale = min(math.sqrt(t / rows.shape[1]) * largest, limit)
    return stream.normal(rows.shape, rows.dtype).to(rows.device).mul_(scale).add_(rows)


class Iso(AdjustableTransform):
    """Add isotropic Gaussian noise, relative to the largest row of the batch.

    Parameters
    ----------
    t : float (default: 1.0)
        Ratio of the noise's expected squared norm to the largest row's.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import Iso
    >>> rows = torch.ones(10_000, 4)
    >>> noise = Iso(t=2.0)(rows, Batch("passive-1", step=1, seed=7)) - rows
    >>> print(f"{noise.square().sum(dim=1).mean() / rows[0].square().sum():.1f}")
    2.0
    """

    def __init__(self, t: float = 1.0) -> None:
        require(0.0 <= t < math.inf, "t", "a number from 0", t)
        self.t = t

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows with noise."""
        return iso(rows, self.t * self.raised, batch.noise())


def max_norm(rows: Tensor, stream: Noise) -> Tensor:
    """Stretch every row at random so that its expected squared norm is the largest.

    Row j becomes g_j·(1 + σ_j·ε_j) with one normal number ε_j per row and
    σ_j² = max‖g‖²/‖g_j‖² − 1. A row of zeros stays zero.
    """
    norms = row_norms(rows).double().clamp(max=torch.finfo(torch.float64).max)
    ratio = norms.max() / norms
    sigma = torch.sqrt(ratio - 1.0) * torch.sqrt(ratio + 1.0)
    sigma = sigma.nan_to_num_(0.0, posinf=0.0)
    drawn = stream.normal((len(rows),), torch.float64).to(rows.device)
    stretch = 1.0 + sigma * drawn
    if rows.dtype == torch.float64 or float(stretch.abs().max()) < 1e30:
        return rows * stretch.to(rows.dtype).unsqueeze(1)
    return (rows.double() * stretch.unsqueeze(1)).to(rows.dtype)


class MaxNorm(RowTransform):
    """Add noise along each row's own direction so that all expected norms are equal.

    The length of a row no longer reveals its label; its direction still may.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import MaxNorm
    >>> rows = torch.tensor([[1.0, 0.0], [0.0, 5.0]])
    >>> changed = MaxNorm()(rows, Batch("passive-1", step=1, seed=7))
    >>> torch.equal(changed[1], rows[1])  # the longest row needs no noise
    True
    """

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the stretched rows."""
        return max_norm(rows, batch.noise())


def laplace(
    shape: Sequence[int], scale: float, dtype: torch.dtype, stream: Noise
) -> Tensor:
    """Return finite numbers drawn from Laplace(0, scale).

    One random bit is the sign, the others make a uniform number u, and −log u is
    exponential. This takes a quarter of the time of torch's ``exponential_`` on a CPU.
    """
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


def compress(rows: Tensor, keep: float) -> Tensor:
    """Keep the ⌈keep·n⌉ entries of largest magnitude, of equal ones the first."""
    wanted = math.ceil(Fraction(str(keep)) * rows.numel())
    sizes = rows.abs().reshape(-1)
    smallest = _largest(sizes, wanted)
    kept = sizes >= smallest
    surplus = int(torch.count_nonzero(kept)) - wanted
    if surplus:
        ties = torch.nonzero(sizes == smallest).squeeze(1)
        kept[ties[-surplus:]] = False
    # A product with 0 and 1 would keep the sign of an entry on its zero.
    return torch.where(kept.reshape(rows.shape), rows, torch.zeros_like(rows))


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Return the k-th largest number; on the CPU numpy is ten times as fast."""
    rank = len(sizes) - k
    if sizes.device.type == "cpu":
        return torch.tensor(np.partition(sizes.numpy(), rank)[rank])
    return sizes.kthvalue(rank + 1).values


class GradientCompression(RowTransform):
    """Keep only the largest entries of the gradient.

    Parameters
    ----------
    keep : float (default: 0.5)
        Share of the entries that are kept.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import GradientCompression
    >>> rows = torch.tensor([[1.0, -4.0], [3.0, 2.0]])
    >>> GradientCompression(keep=0.5)(rows, Batch("passive-1", step=1, seed=7))
    tensor([[ 0., -4.],
            [ 3.,  0.]])
    """

    def __init__(self, keep: float = 0.5) -> None:
        require(0.0 < keep <= 1.0, "keep", "above 0 and at most 1", keep)
        self.keep = keep

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows with all but the largest entries set to zero."""
        return compress(rows, self.keep)


def quantize(rows: Tensor, bins: int, bound: float) -> Tensor:
    """Clamp every entry to ±bound and round it to a multiple of Δ = 2·bound/bins.

    With an odd number of bins ±bound is not a multiple of Δ: the outermost values are
    then ±(bound − Δ/2).
    """
    step = 2.0 * bound / bins
    most = bins // 2
    index = rows.clamp(-bound, bound).div_(step).round_().clamp_(-most, most)
    # Adding 0 turns −0 into 0: its sign would reveal that of the entry.
    return index.mul_(step).add_(0.0)


class MultiBucket(RowTransform):
    """Round every entry to one of a few values.

    Parameters
    ----------
    bins : int (default: 12)
        Number of steps between −bound and bound.
    bound : float (default: 0.03)
        Entries beyond ±bound are clamped. A good value depends on the size of the
        gradient; the published comparison uses 1e-3 for click data.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import MultiBucket
    >>> rows = torch.tensor([[0.1, 0.4, 2.0]])
    >>> MultiBucket(bins=2, bound=0.5)(rows, Batch("passive-1", step=1, seed=7))
    tensor([[0.0000, 0.5000, 0.5000]])
    """

    def __init__(self, bins: int = 12, bound: float = 0.03) -> None:
        require(bins >= 2, "bins", "at least 2", bins)
        require(1e-30 <= bound <= 1e30, "bound", "from 1e-30 to 1e30", bound)
        self.bins = bins
        self.bound = bound

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rounded rows."""
        return quantize(rows, self.bins, self.bound)
