"""Codecs: embeddings and gradients in fewer bytes (docs/how-to/distance.md).

An encoded tensor is a matrix of bytes with one row per example. The receiver knows the
codec and the shape of a row from the settings of the run.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flower_vfl.errors import ConfigError, PartyError, require
from flower_vfl.randomness import generator
from flower_vfl.rows import check_finite
from flower_vfl.specs import build_from_spec

Direction = Literal["embedding", "gradient"]
_REMEDY = "Run one version of flower-vfl with the same settings at every party"
_INT16 = 2**15  # columns that an index of two bytes can name


class Codec(ABC):
    """A pair of functions between rows of float32 numbers and rows of bytes."""

    feedback: bool = False  # whether the sender adds what earlier steps left out

    @abstractmethod
    def size(self, width: int) -> int:
        """Return the bytes of a row with so many entries."""

    @abstractmethod
    def encode(self, rows: Tensor, stream: torch.Generator | None = None) -> Tensor:
        """Return rows as bytes; random rounding draws from the stream, if given."""

    @abstractmethod
    def decode(self, encoded: Tensor, width: int) -> Tensor:
        """Return the rows; raise ValueError for bytes that no encoder makes."""

    def read(
        self,
        encoded: Tensor,
        shape: Sequence[int],
        party: str,
        what: str,
        step: int | None,
    ) -> Tensor:
        """Return a received tensor with rows of a shape, or say what is wrong."""
        width = math.prod(shape)
        size, got = self.size(width), tuple(encoded.shape)
        if len(got) != 2 or got[1] != size or encoded.dtype != torch.uint8:
            problem = f"{what} is {encoded.dtype} of shape {got}, not rows of {size}"
            raise PartyError(party, f"{problem} bytes", _REMEDY, step)
        try:
            rows = self.decode(encoded, width)
        except ValueError as error:
            raise PartyError(party, f"{what} has {error}", _REMEDY, step) from None
        return rows.reshape(len(rows), *shape)


@dataclass
class HalfPrecision(Codec):
    """The nearest number of a type with two bytes; its range is the limit."""

    dtype: torch.dtype

    def size(self, width: int) -> int:
        """Return the bytes of a row with so many entries."""
        return 2 * width

    def encode(self, rows: Tensor, stream: torch.Generator | None = None) -> Tensor:
        """Return rows as bytes."""
        limit = torch.finfo(self.dtype).max
        return rows.clamp(-limit, limit).to(self.dtype).view(torch.uint8)

    def decode(self, encoded: Tensor, width: int) -> Tensor:
        """Return the rows of bytes."""
        return _numbers(encoded, self.dtype).float()


@dataclass
class Integers(Codec):
    """Whole multiples of a scale: with 8 bits, a row x has the scale max|x| / 127.

    Random rounding, ⌊x/scale + u⌋ with u uniform on [0, 1), has the mean x/scale.
    Otherwise the nearest multiple is taken. The scale comes first, as a float32.
    """

    bits: int  # of an entry: 8, 4 or 2

    def __post_init__(self) -> None:
        self._largest = (1 << self.bits - 1) - 1

    def size(self, width: int) -> int:
        """Return the bytes of a row with so many entries."""
        return 4 + math.ceil(width * self.bits / 8)

    def encode(self, rows: Tensor, stream: torch.Generator | None = None) -> Tensor:
        """Return rows as bytes."""
        largest = self._largest
        scale = rows.abs().amax(dim=1, keepdim=True) / largest
        up = torch.full_like(rows, 0.5)
        if stream is not None:
            up = torch.rand(rows.shape, generator=stream).to(rows.device)
        multiples = rows / scale.where(scale > 0.0, torch.ones_like(scale))
        entries = (multiples + up).floor().clamp(-largest, largest) + largest
        missing = -rows.shape[1] % (8 // self.bits)
        codes = functional.pad(entries.to(torch.uint8), (0, missing))
        packed = codes[:, :: 8 // self.bits]
        for place in range(1, 8 // self.bits):
            packed = packed | codes[:, place :: 8 // self.bits] << place * self.bits
        return torch.cat([scale.view(torch.uint8), packed], dim=1)

    def decode(self, encoded: Tensor, width: int) -> Tensor:
        """Return the rows of bytes."""
        scale = _numbers(encoded[:, :4], torch.float32)
        if not bool((scale >= 0.0).all()) or not bool(scale.isfinite().all()):
            raise ValueError("a scale that is negative, infinite or NaN")
        shifts = torch.arange(0, 8, self.bits, device=encoded.device)
        codes = encoded[:, 4:, None] >> shifts.to(torch.uint8) & (1 << self.bits) - 1
        codes = codes.flatten(1)[:, :width]
        if bool((codes > 2 * self._largest).any()):
            raise ValueError("an entry that is larger than its scale allows")
        rows: Tensor = (codes.float() - self._largest) * scale
        return rows


@dataclass
class TopK(Codec):
    """The largest entries of each row, as float32, and their ascending indices."""

    keep: float  # share of the entries, at least one per row
    feedback: bool = False

    def __post_init__(self) -> None:
        require(0.0 < self.keep <= 1.0, "keep", "above 0 and up to 1", self.keep)

    def _kept(self, width: int) -> int:
        return max(1, math.ceil(round(self.keep * width, 6)))

    def size(self, width: int) -> int:
        """Return the bytes of a row with so many entries."""
        return self._kept(width) * (6 if width <= _INT16 else 8)

    def encode(self, rows: Tensor, stream: torch.Generator | None = None) -> Tensor:
        """Return rows as bytes."""
        width = rows.shape[1]
        kept = rows.abs().topk(self._kept(width), dim=1, sorted=False).indices
        kept = kept.sort(dim=1).values
        values = rows.gather(1, kept).view(torch.uint8)
        indices = kept.to(_index_type(width)).view(torch.uint8)
        return torch.cat([values, indices], dim=1)

    def decode(self, encoded: Tensor, width: int) -> Tensor:
        """Return the rows of bytes."""
        end = 4 * self._kept(width)
        values = _numbers(encoded[:, :end], torch.float32)
        indices = _numbers(encoded[:, end:], _index_type(width)).long()
        inside = (indices >= 0) & (indices < width)
        if not bool(inside.all()) or not bool((indices.diff(dim=1) > 0).all()):
            raise ValueError("indices that are out of range or out of order")
        return values.new_zeros(len(values), width).scatter_(1, indices, values)


@dataclass
class LowRank(Codec):
    """The best matrices U (rows, rank) and V (columns, rank) for a batch U·Vᵀ.

    Two steps of subspace iteration find them (Vogels et al., PowerSGD,
    https://arxiv.org/abs/1905.13727). The rows of V are sent after those of U.
    """

    rank: int = 1

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank", "at least 1", self.rank)

    def size(self, width: int) -> int:
        """Return the bytes of a row with so many entries."""
        return 4 * min(self.rank, width)

    def encode(self, rows: Tensor, stream: torch.Generator | None = None) -> Tensor:
        """Return rows as bytes, and the directions after them."""
        rank = min(self.rank, rows.shape[1])
        unit = rows.abs().max() if rows.numel() else torch.ones(())
        scaled = rows / unit.where(unit > 0.0, torch.ones_like(unit))
        order = torch.linalg.vector_norm(scaled, dim=1).argsort(descending=True)
        basis = functional.pad(scaled[order[:rank]].mT, (0, max(0, rank - len(rows))))
        for _ in range(2):
            basis = torch.linalg.qr(scaled.mT @ (scaled @ basis)).Q
        return torch.cat([rows @ basis, basis]).contiguous().view(torch.uint8)

    def decode(self, encoded: Tensor, width: int) -> Tensor:
        """Return the rows of bytes."""
        factors = _numbers(encoded, torch.float32)
        if len(factors) < width or not bool(factors.isfinite().all()):
            raise ValueError("factors that are missing, infinite or NaN")
        return factors[:-width] @ factors[-width:].mT


def _numbers(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a type."""
    # A view needs strides that fit; contiguous() leaves those of a single row alone.
    return encoded.clone(memory_format=torch.contiguous_format).view(dtype)


def _index_type(width: int) -> torch.dtype:
    return torch.int16 if width <= _INT16 else torch.int32


def _none() -> None:
    """Send float32 as it is."""


CODECS: dict[str, Callable[..., Codec | None]] = {
    "none": _none,
    "float16": partial(HalfPrecision, torch.float16),
    "bfloat16": partial(HalfPrecision, torch.bfloat16),
    "int8": partial(Integers, 8),
    "int4": partial(Integers, 4),
    "int2": partial(Integers, 2),
    "topk": TopK,
    "lowrank": LowRank,
}


def build_codec(text: str) -> Codec | None:
    """Return the codec that a config string describes; None sends float32 as it is."""
    return build_from_spec("codec", text, CODECS) if text else None


@dataclass(frozen=True)
class Compression:
    """The codecs of a run, as config strings.

    Parameters
    ----------
    embeddings, gradients : str (default: "")
        ``"float16"``, ``"bfloat16"``, ``"int8"``, ``"int4"``, ``"int2"``,
        ``"topk:keep=0.1"``, ``"lowrank:rank=1"``, or ``"none"`` for float32.

    Examples
    --------
    >>> from flower_vfl.strategies import Compression, VerticalStrategy
    >>> codecs = Compression(embeddings="int8", gradients="topk:keep=0.25")
    >>> strategy = VerticalStrategy(compression=codecs)
    """

    embeddings: str = ""
    gradients: str = ""

    def __post_init__(self) -> None:
        for name in ("embeddings", "gradients"):
            if build_codec(getattr(self, name)) is None:
                object.__setattr__(self, name, "")

    def __str__(self) -> str:
        """Return the codecs for a log, or nothing."""
        named = {"embeddings": self.embeddings, "gradients": self.gradients}
        return ", ".join(f"{name} {codec}" for name, codec in named.items() if codec)


class Encoder:
    """The sending side of a codec: its random numbers, and what it has left out.

    Everybody may know the random numbers: encoding comes after the defense. A bound of
    a defense for one step does not hold for what error feedback sends.
    """

    def __init__(self, codec: Codec, seed: int, direction: Direction) -> None:
        self.codec = codec
        self._seed, self._direction = seed, direction
        self._left: dict[str, Tensor] = {}  # by party, one row for each row of the run

    def encode(
        self, tensor: Tensor, party: str, step: int, rows: Tensor | None
    ) -> Tensor:
        """Return the bytes of a batch; error feedback needs the numbers of its rows."""
        sent = self._rows(tensor, party, step)
        stream = generator(self._seed, "codec", self._direction, party, step)
        if not self.codec.feedback:
            return self.codec.encode(sent, stream)
        assert rows is not None
        left = self._left.get(party, sent.new_zeros(0, sent.shape[1])).to(sent.device)
        if (missing := int(rows.max()) + 1 - len(left)) > 0:
            left = torch.cat([left, left.new_zeros(missing, left.shape[1])])
        sent = sent + left[rows]
        encoded = self.codec.encode(sent, stream)
        left[rows] = sent - self.codec.decode(encoded, sent.shape[1])
        self._left[party] = left
        return encoded

    def encode_for_use(self, tensor: Tensor, party: str, step: int | None) -> Tensor:
        """Return the bytes of an embedding for predictions; they depend on it alone."""
        return self.codec.encode(self._rows(tensor, party, step))

    def _rows(self, tensor: Tensor, party: str, step: int | None) -> Tensor:
        """Return a tensor as a matrix of finite float32 numbers."""
        what, remedy = f"its {self._direction}", "Lower the learning rate"
        check_finite(tensor, party, what, remedy, step)
        if tensor.dtype == torch.float64:
            raise ConfigError("codecs send float32, but this model computes in float64")
        return tensor.detach().flatten(1).float().contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return what was left out so far."""
        return {party: left.clone() for party, left in self._left.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._left = {party: left.clone() for party, left in state.items()}


def build_encoder(text: str, seed: int, direction: Direction) -> Encoder | None:
    """Return the sending side of a codec, None if tensors are sent as they are."""
    codec = build_codec(text)
    return None if codec is None else Encoder(codec, seed, direction)
