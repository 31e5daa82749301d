"""What a party holds after the handshake."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .elements import Elements
from .lists import Positions
from .sealing import framed


@dataclass(frozen=True, eq=False)
class Alignment:
    """What a party holds after the handshake.

    Parameters
    ----------
    universe : Elements
        The universal ids, sorted: the same at every party.
    positions : Positions
        For each id of this party, in the order it was given: the row of its universal
        id, or -1 for an id outside of an intersection.
    dummies : Positions
        The rows of this party's dummy ids (see `flower_vfl.alignment.padding`).
    counts : Mapping[str, int]
        How many ids each party announced, with its dummies: what was revealed.
    """

    universe: Elements
    positions: Positions
    dummies: Positions
    counts: Mapping[str, int]

    def revealed(self) -> dict[str, int]:
        """Return every number that this party has learnt about the others."""
        return {**self.counts, "aligned": len(self.universe)}

    def fingerprint(self, agreed: bytes) -> str:
        """Return what is the same at all parties of one handshake and nowhere else."""
        digest = hashlib.blake2b(framed(agreed), digest_size=32)
        digest.update(self.universe.data)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the alignment as plain values and arrays."""
        return {**vars(self), "counts": dict(self.counts)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Alignment:
        """Return an alignment that was kept."""
        return cls(**state)
