"""Letters in sealed parts: what a relay carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from .elements import Group
from .psu import Phase
from .ring import REMEDY, Letter
from .sealing import Header, Sealed, SealError, Seals, framed

PART = 1 << 16  # elements in one part: 2 MiB of ristretto255


def settings(method: str, group: str, ring: Sequence[str], padding: int) -> bytes:
    """Return what all parties must agree on, as `Seals` binds it to every letter.

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


class Post:
    """One party's letter box: whole letters inside, sealed parts outside.

    Parameters
    ----------
    seals : Seals
        This party's seals, after it has met the others.
    group : Group
        The group of the elements.
    part : int (default: 65536)
        Most elements in one part.
    """

    def __init__(self, seals: Seals, group: Group, part: int = PART) -> None:
        self._seals = seals
        self._group = group
        self._part = part
        self._open: dict[str, tuple[Header, list[bytes]]] = {}

    def send(self, letter: Letter) -> Iterator[Sealed]:
        """Yield the sealed parts of a letter, which must be delivered in this order.

        Parameters
        ----------
        letter : Letter
            A letter from this party.
        """
        count = len(letter.elements)
        starts = range(0, max(count, 1), self._part)
        for number, start in enumerate(starts):
            header = Header(
                letter.phase,
                letter.owner,
                letter.hop,
                letter.sender,
                letter.receiver,
                count,
                number,
                len(starts),
            )
            rows = letter.elements[start : start + self._part]
            yield self._seals.seal(header, self._group.encode(rows))

    def receive(self, sealed: Sealed) -> Letter | None:
        """Return a letter with its last part, None with an earlier one.

        Parameters
        ----------
        sealed : Sealed
            One part of a letter to this party.
        """
        content = self._seals.open(sealed)
        header, sender = sealed.header, sealed.header.sender
        first, contents = self._open.setdefault(sender, (header, []))
        contents.append(content)
        size = sum(map(len, contents))
        expected = header.count * self._group.size
        same = _whole(first) == _whole(header) and header.part == len(contents) - 1
        if not same or not header.part < header.parts or size > expected:
            raise SealError(sender, "has mixed the parts of two letters", REMEDY)
        if header.part + 1 < header.parts:
            return None
        del self._open[sender]
        if size != expected:
            problem = f"has not sent the {header.count} elements that it announced"
            raise SealError(sender, problem, REMEDY)
        return Letter(
            cast(Phase, header.phase),
            header.owner,
            header.hop,
            sender,
            header.receiver,
            self._group.decode(b"".join(contents)),
        )


def _whole(header: Header) -> tuple[str, str, int, int, int]:
    """Return what all parts of one letter have in common."""
    return header.phase, header.owner, header.hop, header.count, header.parts
