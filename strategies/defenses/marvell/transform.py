"""Label Leakage and Protection in Two-party Split Learning (Li et al., ICLR 2022).

https://arxiv.org/abs/2102.08504. Marvell: Gaussian noise that hides the label best.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError, check_name, require
from flower_vfl.privacy.accountant import SUM_KL, composed_auc
from flower_vfl.randomness import Noise
from flower_vfl.rows import AdjustableTransform
from flower_vfl.transform import AUC_BOUND, Batch

from .multiclass import solve_multiclass
from .solver import MarvellSolution, allowed_sum_kl, least_power, solve_marvell

Span = Literal["step", "run"]
_BLOCK = 1 << 17  # entries held in double precision at a time
Statistics = tuple[Tensor, Tensor, Tensor]  # size, mean and variance of each class


@dataclass(frozen=True)
class ClassNoise:
    """Row of class c: Σ along[c, k]·N(0, 1)·directions[k] + isotropic[c]·N(0, I)."""

    labels: Tensor
    directions: Tensor
    along: Tensor
    isotropic: Tensor

    @classmethod
    def binary(
        cls, labels: Tensor, delta: Tensor, solution: MarvellSolution, scale: float
    ) -> ClassNoise:
        """Return the noise of a solution for two classes."""
        length = float(torch.linalg.vector_norm(delta))
        direction = delta / length if length > 0.0 else delta
        lambdas = torch.tensor(astuple(solution)[:4], dtype=torch.float64)
        first, isotropic = lambdas[::2], lambdas[1::2]
        along = (first - isotropic).sqrt().unsqueeze(1) * scale
        return cls(labels, direction.unsqueeze(0), along, isotropic.sqrt() * scale)

    def classes_of(self, labels: Tensor) -> Tensor:
        """Return the index of the class whose label is nearest, for each label."""
        apart = (labels.double().unsqueeze(1) - self.labels.to(labels.device)).abs()
        return apart.argmin(dim=1)


def add_noise(
    rows: Tensor, classes: Tensor, noise: ClassNoise, stream: Noise
) -> Tensor:
    """Add Gaussian noise that depends on the class of a row."""
    width, d = noise.directions.shape
    limit = torch.finfo(rows.dtype).max / (64 * (1 + width))  # no sum overflows
    along = len(rows) * width if bool(noise.along.any()) else 0
    deviations = noise.isotropic.clamp(max=limit).to(rows)[classes]
    chosen = deviations.nonzero().squeeze(1)  # drawn only for the rows that get it
    if not along and not len(chosen):
        return rows
    drawn = stream.normal((along + len(chosen) * d,), rows.dtype).to(rows.device)
    changed = rows
    if along:
        on_line = drawn[:along].reshape(len(rows), width)
        on_line *= noise.along.clamp(max=limit).to(rows)[classes]
        changed = torch.addmm(rows, on_line, noise.directions.to(rows))
    if len(chosen):
        around = drawn[along:].reshape(len(chosen), d)
        around *= deviations[chosen].unsqueeze(1)
        target = changed.clone() if changed is rows else changed
        changed = target.index_add_(0, chosen, around)
    return changed


def class_statistics(rows: Tensor, classes: Tensor, count: int) -> Statistics:
    """Return size, mean and variance per coordinate of each class, on the CPU.

    Two passes over blocks that fit into the cache; the same bits on every run.
    """
    d = rows.shape[1]
    block = max(_BLOCK // max(d, count), 1)
    owned = len(rows) <= block and rows.dtype != torch.float64
    if owned:
        rows = rows.double()  # once for both passes
    numbers = torch.arange(count, device=rows.device).unsqueeze(1)
    blocks = torch.split(rows, block), torch.split(classes, block)
    pairs = list(zip(*blocks, strict=True))
    sizes = rows.new_zeros(count, dtype=torch.float64)
    means = rows.new_zeros(count, d, dtype=torch.float64)
    for part, index in pairs:
        members = (numbers == index).double()
        sizes += members.sum(dim=1)
        means.addmm_(members, part.double())
    means /= sizes.unsqueeze(1)
    squares = torch.zeros_like(sizes)
    for part, index in pairs:
        members = (numbers == index).double()
        out = part if owned else None  # new memory costs more than the product
        centred = torch.addmm(part.double(), members.T, means, alpha=-1.0, out=out)
        squares += members @ torch.linalg.vector_norm(centred, dim=1).square_()
    return sizes.cpu(), means.cpu(), (squares / (sizes * d)).cpu()


class Marvell(AdjustableTransform):
    """Add noise whose covariances minimise the divergence between the classes.

    A batch reports the metrics ``sum_kl`` and ``auc_bound``, an upper bound on the AUC
    of any attack on a single row. A batch with one class gets the noise of the party's
    last batch with more, if there was one; it reports ``one_class`` and no bound. More
    than two classes are our extension: all share one covariance, and the bound is that
    of the worst pair.

    Parameters
    ----------
    s : float (default: 4.0)
        Power of the noise over the squared distance between the class means.
    auc : float | None (default: None)
        Our dynamic mode: every batch gets the least power whose bound is at most this
        AUC, instead of ``s``; the metric ``marvell_s`` is the power in its unit.
    over : Literal["step", "run"] (default: "step")
        What the AUC is a bound for. ``"run"`` spends its divergence evenly over the
        epochs, and refuses a batch with one class, and more epochs.
    epochs : int (default: 0)
        Number of epochs that the bound of a run is for.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import Marvell
    >>> labels = torch.arange(100) % 2
    >>> rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    >>> batch = Batch("passive-1", step=1, seed=7, labels=labels)
    >>> changed = Marvell(auc=0.6)(rows + labels[:, None], batch)
    >>> print(f"{batch.metrics['auc_bound']:.3f}")
    0.600
    """

    requires_labels = True

    def __init__(
        self,
        s: float = 4.0,
        auc: float | None = None,
        over: Span = "step",
        epochs: int = 0,
    ) -> None:
        require(0.0 <= s < math.inf, "s", "a number from 0", s)
        check_name("span of Marvell's bound", over, get_args(Span))
        whole = over == "run"
        if whole != (epochs > 0) or (whole and auc is None):
            raise ConfigError("over=run, an auc and epochs=... belong together")
        self.run_auc = auc if whole else None
        self._step_auc = 0.5
        if auc is not None:
            allowed = allowed_sum_kl(auc)  # refuses an AUC that cannot be a bound
            self._step_auc = composed_auc([allowed / epochs]) if whole else auc
        self.s, self.auc, self.over, self.epochs = s, auc, over, epochs
        self._last: dict[str, ClassNoise] = {}

    @property
    def _s(self) -> float:
        return self.s * self.raised

    @property
    def _auc(self) -> float | None:
        return None if self.auc is None else 0.5 + (self._step_auc - 0.5) / self.raised

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the rows with noise."""
        labels = self.labels(batch, len(rows)).to(rows.device)
        values, classes = _classes(labels, batch)
        batch.metrics["one_class"] = float(len(values) == 1)
        if self.run_auc is not None:
            self._check_run(len(values), batch)
        if len(values) > 1:
            noise = self._solve(rows, classes, values, batch)
            self._last[batch.party] = noise
        else:
            last = self._last.get(batch.party)
            if last is None or last.directions.shape[1] != rows.shape[1]:
                return rows
            noise, classes = last, last.classes_of(labels)
        return add_noise(rows, classes, noise, batch.noise())

    def _check_run(self, classes: int, batch: Batch) -> None:
        """Refuse a batch for which the bound of a run does not hold."""
        if batch.epoch > self.epochs:
            problem = f"Marvell's bound is for {self.epochs} epochs, which are over"
            remedy = "Train fewer epochs, or give Marvell more (epochs=...)"
            raise PartyError(batch.party, problem, remedy, batch.step)
        if classes == 1:
            problem = "a batch has one class, and Marvell's bound of a run needs two"
            raise PartyError(batch.party, problem, "Use larger batches", batch.step)

    def _solve(
        self, rows: Tensor, classes: Tensor, values: Tensor, batch: Batch
    ) -> ClassNoise:
        """Return the noise for a batch with several classes and report its bound."""
        scale = _unit(rows)
        scaled = rows if scale == 1.0 else rows / scale
        statistics = class_statistics(scaled, classes, len(values))
        if not bool(statistics[2].isfinite().all()):
            problem = "its gradient has entries that are not finite"
            remedy = "Lower the learning rate, or check the party's data and model"
            raise PartyError(batch.party, problem, remedy, batch.step)
        solve = self._binary if len(values) == 2 else self._multiclass
        noise, sum_kl, needed = solve(values, statistics, scale)
        batch.metrics[AUC_BOUND] = composed_auc([sum_kl])
        if math.isfinite(sum_kl):
            batch.metrics[SUM_KL] = sum_kl
        if self.auc is not None and math.isfinite(needed):
            batch.metrics["marvell_s"] = needed
        return noise

    def _binary(
        self, values: Tensor, statistics: Statistics, scale: float
    ) -> tuple[ClassNoise, float, float]:
        """Return the paper's noise, its divergence, and its power in units of s."""
        sizes, means, variances = statistics
        delta = means[1] - means[0]
        q, p = float(delta @ delta), float(sizes[1] / sizes.sum())
        u, v = variances.tolist()
        given, auc = (u, v, means.shape[1], q, p), self._auc
        power = min(self._s * q, 1e300) if auc is None else least_power(*given, auc)
        solution = solve_marvell(*given, power)
        noise = ClassNoise.binary(values, delta, solution, scale)
        return noise, solution.sum_kl, power / q if q > 0.0 else math.inf

    def _multiclass(
        self, values: Tensor, statistics: Statistics, scale: float
    ) -> tuple[ClassNoise, float, float]:
        """Return our noise for several classes, its divergence, and its power."""
        sizes, means, variances = statistics
        weights = (sizes / sizes.sum()).numpy()
        found = solve_multiclass(means, variances.numpy(), weights, self._s, self._auc)
        along = (torch.from_numpy(np.sqrt(found.along)) * scale).repeat(len(values), 1)
        isotropic = torch.from_numpy(np.sqrt(found.isotropic)) * scale
        noise = ClassNoise(values, found.directions, along, isotropic)
        needed = found.power / found.spread if found.spread > 0.0 else math.inf
        return noise, found.sum_kl, needed

    def state_dict(self) -> dict[str, Any]:
        """Return the last noise of each party, and the factor of its strength."""
        noise = {party: dict(vars(last)) for party, last in self._last.items()}
        return {**super().state_dict(), "noise": noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if set(state) != {"raised", "noise"}:
            raise ConfigError(f"{sorted(state)} is not the state of a Marvell defense")
        super().load_state_dict(state)
        self._last = {
            party: ClassNoise(**{name: tensor.cpu() for name, tensor in saved.items()})
            for party, saved in state["noise"].items()
        }


def _unit(rows: Tensor) -> float:
    """Return a power of two by which to divide rows so that squares do not overflow."""
    if rows.dtype != torch.float64:  # squares of the other types fit into doubles
        return 1.0
    largest = float(torch.linalg.vector_norm(rows, math.inf))
    if largest == 0.0 or 1e-60 < largest < 1e60 or not math.isfinite(largest):
        return 1.0
    return math.ldexp(1.0, max(math.frexp(largest)[1] - 1, -1022))


def _classes(labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the labels that occur, ascending, and the class of every row."""
    low, high = (float(end) for end in torch.aminmax(labels))
    whole = not labels.is_floating_point() or bool((labels == labels.floor()).all())
    if not (whole and math.isfinite(high - low)):
        problem = "Marvell needs classes, and these labels are not whole numbers"
        remedy = "Use a defense that needs no labels, e.g. iso or max-norm"
        raise PartyError(batch.party, problem, remedy, batch.step)
    if low == high:
        return torch.tensor([low], dtype=torch.float64), torch.zeros_like(labels).long()
    if high - low == 1.0:  # the usual case, without a sort
        return torch.tensor([low, high], dtype=torch.float64), (labels == high).long()
    values, classes = torch.unique(labels, return_inverse=True)
    return values.double().cpu(), classes
