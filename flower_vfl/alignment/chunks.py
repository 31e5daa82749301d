"""Letters in sealed parts: what a relay carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, cast

import numpy as np

from .elements import Group
from .psu import Phase
from .ring import REMEDY, RoundMessage
from .sealing import Header, Sealed, SealError, SecureChannel, framed

PART = 1 << 16  # elements in one part: 2 MiB of ristretto255


def settings(method: str, group: str, ring: Sequence[str], padding: int) -> bytes:
    """Return what all parties must agree on, as `SecureChannel` binds it to every letter.

    Parameters
    ----------
    method : str
        ``psu`` or ``psi``.
    group : str
        Name of the group.
    ring : Sequence[str]
        Names of all parties in their order.
    padding : int
        Number of dummy ids.
    """
    names = framed(*(name.encode() for name in ring))
    return framed(method.encode(), group.encode(), names, str(padding).encode())


@dataclass
class _Arriving:
    """A letter of which some parts have come."""

    first: Header
    parts: int
    content: bytearray


class ChunkCodec:
    """One party's letter box: whole letters inside, sealed parts outside.

    Parameters
    ----------
    seals : SecureChannel
        This party's seals, after it has met the others.
    group : Group
        The group of the elements.
    part : int (default: 65536)
        Most elements in one part.
    """

    def __init__(self, seals: SecureChannel, group: Group, part: int = PART) -> None:
        self._seals = seals
        self._group = group
        self._part = part
        self._arriving: dict[str, _Arriving] = {}

    def parts(self, letter: RoundMessage) -> int:
        """Return in how many parts a letter travels."""
        return max(1, -(-len(letter.elements) // self._part))

    def seal(self, letter: RoundMessage, number: int) -> Sealed:
        """Return one sealed part of a letter; the parts must be sealed in order."""
        header = Header(
            letter.phase,
            letter.owner,
            letter.hop,
            letter.sender,
            letter.receiver,
            len(letter.elements),
            number,
            self.parts(letter),
        )
        start = number * self._part
        rows = letter.elements[start : start + self._part]
        return self._seals.seal(header, self._group.encode(rows))

    def send(self, letter: RoundMessage) -> Iterator[Sealed]:
        """Yield the sealed parts of a letter, which must be delivered in this order."""
        return (self.seal(letter, number) for number in range(self.parts(letter)))

    def receive(self, sealed: Sealed) -> RoundMessage | None:
        """Return a letter with its last part, None with an earlier one."""
        content = self._seals.open(sealed)
        header, sender = sealed.header, sealed.header.sender
        letter = self._arriving.setdefault(sender, _Arriving(header, 0, bytearray()))
        letter.parts += 1
        letter.content += content
        size, whole = len(letter.content), header.count * self._group.size
        same = _whole(letter.first) == _whole(header)
        same = same and letter.parts == header.part + 1 <= header.parts
        if not same or size > whole:
            raise SealError(sender, "has mixed the parts of two letters", REMEDY)
        if letter.parts < header.parts:
            return None
        del self._arriving[sender]
        if size != whole:
            problem = f"has not sent the {header.count} elements that it announced"
            raise SealError(sender, problem, REMEDY)
        return RoundMessage(
            cast(Phase, header.phase),
            header.owner,
            header.hop,
            sender,
            header.receiver,
            self._group.decode(letter.content),
        )

    def close(self) -> None:
        """Forget the parts of unfinished letters."""
        self._arriving.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished letters as plain values and arrays."""
        return {
            sender: {
                "first": list(astuple(letter.first)),
                "parts": letter.parts,
                "content": np.array(letter.content, np.uint8),
            }
            for sender, letter in self._arriving.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another object of the same party and session was."""
        self._arriving = {
            sender: _Arriving(
                Header(*kept["first"]), kept["parts"], bytearray(kept["content"])
            )
            for sender, kept in state.items()
        }


def _whole(header: Header) -> tuple[str, str, int, int, int]:
    """Return what all parts of one letter have in common."""
    return header.phase, header.owner, header.hop, header.count, header.parts
