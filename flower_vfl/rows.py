"""Gradients as rows, for transforms and attacks: norms, checks, base classes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError

if TYPE_CHECKING:
    from flower_vfl.protocol.codecs import Codec
    from flower_vfl.transform import Batch


SMALLEST, LARGEST = 1e-15, 1e15  # norms whose squares single precision holds


def to_rows(gradient: Tensor) -> Tensor:
    """Return a gradient of any shape as a matrix, half precision as single."""
    count = len(gradient) if gradient.ndim else 1
    rows = gradient.detach().reshape(count, math.prod(gradient.shape[1:]))
    half = rows.dtype in (torch.float16, torch.bfloat16)
    return rows.float() if half else rows


def row_norms(rows: Tensor) -> Tensor:
    """Return the norm of every row, as doubles if squares vanished or overflowed."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    if not rows.numel():
        return norms
    low, high = (float(end) for end in torch.aminmax(norms))
    if low >= SMALLEST and high <= LARGEST:  # squares neither vanished nor overflowed
        return norms
    if rows.dtype != torch.float64:
        wide: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
        return wide
    largest = rows.abs().amax(dim=-1, keepdim=True)
    largest = largest.clamp_min(torch.finfo(rows.dtype).tiny)
    norms = torch.linalg.vector_norm(rows / largest, dim=-1)
    return norms * largest.squeeze(-1)


def check_finite(
    tensor: Tensor, party: str, what: str, remedy: str, step: int | None
) -> None:
    """Raise if a tensor holds a NaN or an infinite entry."""
    # A sum is several times cheaper than looking at each entry, and finite if all
    # are; only a sum that overflowed needs the second look.
    if math.isfinite(tensor.sum().item()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        problem = f"{what} has {bad} NaN or infinite of {tensor.numel()} entries"
        raise PartyError(party, problem, remedy, step)


def received_embeddings(
    embeddings: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    rows: int,
    device: torch.device,
    codec: Codec | None,
    step: int | None,
) -> dict[str, Tensor]:
    """Return the parties' embeddings on a device, in order, or name the wrong one."""
    remedy = "Look at that party's features, model and learning rate"
    received = {}
    for name, shape in shapes.items():
        if name not in embeddings:
            raise PartyError(name, "its embedding is missing", remedy, step)
        part = embeddings[name]
        if codec is not None:
            part = codec.read(part, shape, name, "its embedding", step)
        if part.shape != (rows, *shape):
            given, expected = tuple(part.shape), (rows, *shape)
            problem = f"sent an embedding of shape {given}, expected {expected}"
            remedy = "Its bottom model must return one row per input row, of one width"
            raise PartyError(name, problem, remedy, step)
        if not part.is_floating_point():
            problem = f"sent an embedding of type {part.dtype}"
            raise PartyError(name, problem, "Its bottom model must return floats", step)
        check_finite(part, name, "its embedding", remedy, step)
        received[name] = part.to(device)
    return received


class RowTransform(ABC):
    """A gradient transform whose formula works on a matrix with one row per example.

    A subclass implements :meth:`perturb`, which must not change its argument. The base
    class flattens gradients of any shape to rows, computes half precision in single
    precision, returns an empty batch as it is, and clamps the result to its dtype.

    Examples
    --------
    >>> from flower_vfl import Batch
    >>> from flower_vfl.strategies import RowTransform
    >>> class Halve(RowTransform):
    ...     def perturb(self, rows, batch):
    ...         return rows / 2
    >>> Halve()(torch.ones(1, 2), Batch("passive-1", step=1, seed=7))
    tensor([[0.5000, 0.5000]])
    """

    requires_labels = False

    @abstractmethod
    def perturb(self, rows: Tensor, batch: Batch) -> Tensor | None:
        """Return what the party gets for a B×d gradient, or None to withhold it."""

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        """Return the gradient that leaves for the party."""
        if not gradient.is_floating_point():
            problem = f"its gradient is of type {gradient.dtype}"
            remedy = "A defense works on floating point numbers"
            raise PartyError(batch.party, problem, remedy, batch.step)
        if gradient.numel() == 0:
            return gradient
        if not batch.digest:  # not called by a defender
            batch = batch.with_digest(gradient)
        rows = to_rows(gradient)
        changed = self.perturb(rows, batch)
        if changed is None or changed is rows:
            return None if changed is None else gradient
        same = changed.dtype == gradient.dtype
        if not (same and math.isfinite(changed.sum().item())):  # cheaper than a clamp
            limits = torch.finfo(gradient.dtype)
            changed = changed.clamp(limits.min, limits.max).to(gradient.dtype)
        return changed.reshape(gradient.shape)

    def labels(self, batch: Batch, rows: int) -> Tensor:
        """Return the labels of a batch, one per row; refuse a batch without them."""
        name = type(self).__name__
        if batch.labels is None:
            problem = f"{name} needs the labels of the batch and got none"
            remedy = "Pass labels where the defense runs, or run it at the label party"
            raise PartyError(batch.party, problem, remedy, batch.step)
        flat = batch.labels.detach().reshape(-1)
        if len(flat) != rows:
            problem = f"{name} got {len(flat)} labels for {rows} rows of its gradient"
            raise PartyError(batch.party, problem, "Give one label per row", batch.step)
        return flat

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; nothing by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if state:
            name = type(self).__name__
            raise ConfigError(f"{name} keeps no state, got {list(state)}")


class AdjustableTransform(RowTransform):
    """A transform whose strength is one number that can be raised during training.

    A subclass multiplies its parameter by :attr:`raised`. This factor is its state, so
    that a resumed run continues with the strength that was reached.

    Examples
    --------
    >>> from flower_vfl.strategies import Iso
    >>> transform = Iso(t=1.0)
    >>> transform.strengthen(2.0)
    'Iso is now 2 times as strong as its setting'
    >>> transform.state_dict()
    {'raised': 2.0}
    """

    raised = 1.0

    def strengthen(self, factor: float) -> str:
        """Multiply the strength from now on; return a message for the log."""
        self.raised *= factor
        name, raised = type(self).__name__, self.raised
        return f"{name} is now {raised:g} times as strong as its setting"

    def state_dict(self) -> dict[str, Any]:
        """Return the factor by which the strength was raised."""
        return {"raised": self.raised}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if "raised" not in state:
            name = type(self).__name__
            raise ConfigError(f"{sorted(state)} is not the state of the defense {name}")
        self.raised = float(state["raised"])
