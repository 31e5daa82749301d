"""Alignments with mutated messages, and how the cases of any campaign are counted."""

from __future__ import annotations

import secrets
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fuzz_cases import Mutator
from rings import CONFIG, NAMES

from flower_vfl.alignment import AlignmentSettings, Identity, encode_ids
from flower_vfl.alignment.handshake import Handshake
from flower_vfl.alignment.messages import (
    Hello,
    pack_chunks,
    pack_handshake,
    pack_hellos,
    unpack_chunks,
    unpack_handshake,
    unpack_hellos,
)
from flower_vfl.errors import VerticalError
from flower_vfl.protocol.messages import Content


@dataclass
class Findings:
    """How the cases of a campaign ended."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        """Note something that must not happen."""
        self.ended["failure"] += 1
        self.failures.append(what)


def repeat(count: int, one: Callable[[int], None], found: Findings) -> None:
    """Run cases one after the other; an exception is a failure."""
    for number in range(count):
        try:
            one(number)
        except Exception:
            found.fail(f"case {number}: {traceback.format_exc()}")


def alignments(mutator: Mutator, count: int) -> Findings:
    """Align three parties with one mutated message each: the same ids or an error."""
    found = Findings()
    ids = [encode_ids(each) for each in ([1, 2, 3], [2, 3, 4], [3, 5])]
    identities = {name: Identity() for name in NAMES}
    pins = {name: identity.public for name, identity in identities.items()}
    settings = {
        name: AlignmentSettings(identity=identities[name], pins=pins) for name in NAMES
    }

    def one(number: int) -> None:
        at = mutator.random.randrange(30)
        turn = iter(range(1 << 30))

        def travel(config: dict[str, Any]) -> Content:
            return Content(config if next(turn) != at else mutator.entries(config))

        config = replace(CONFIG, session=secrets.token_bytes(16), chunk_bytes=64)
        try:
            parties = {
                name: Handshake(
                    name,
                    unpack_handshake(travel(pack_handshake(config))),
                    settings[name],
                    own,
                )
                for name, own in zip(NAMES, ids, strict=True)
            }
            hellos: list[Hello] = []
            for party in parties.values():
                hellos += unpack_hellos(travel(pack_hellos([party.hello()])))
            for party in parties.values():
                party.exchange_keys(hellos)
            while any(party.has_more for party in parties.values()):
                for party in parties.values():
                    chunks = unpack_chunks(travel(pack_chunks(party.next_chunks(200))))
                    for chunk in chunks:
                        if chunk.header.receiver in parties:
                            parties[chunk.header.receiver].receive([chunk])
            saved = [party.finish() for party in parties.values()]
        except VerticalError as error:
            found.ended[f"error: {type(error).__name__}"] += 1
            return
        universes = {each.aligned.universe.tobytes() for each in saved}
        rows = [set(each.aligned.positions.tolist()) for each in saved]
        shared = [
            len(rows[0] & rows[1]),
            len(rows[1] & rows[2]),
            len(rows[0] & rows[2]),
        ]
        if len(universes) != 1 or shared != [2, 1, 1] or len(set.union(*rows)) != 5:
            found.fail(f"alignment {number}: another result: {shared}")
        else:
            found.ended["equal ids"] += 1

    repeat(count, one, found)
    return found
