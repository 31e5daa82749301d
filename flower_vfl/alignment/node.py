"""What a party does at each stage of the alignment handshake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flwr.app import Context

from flower_vfl.errors import PartyError, unknown_name
from flower_vfl.parties.checkpoints import open_store
from flower_vfl.parties.digests import keyed_digest
from flower_vfl.parties.label import LabelParty
from flower_vfl.protocol.messages import Content, Value
from flower_vfl.protocol.replay import Session

from . import AlignmentSettings
from .handshake import Handshake, KeptAlignment, ids_of
from .messages import (
    Stage,
    digest_key,
    pack_hellos,
    pack_parts,
    unpack_hellos,
    unpack_invitation,
    unpack_parts,
)
from .ring import REMEDY


def align(session: Session, content: Content, context: Context) -> Content:
    """Return the reply of a party to a request of the handshake."""
    stage = content.text("stage")
    if stage not in _STAGES:
        raise unknown_name("stage", stage, _STAGES)
    return _STAGES[Stage(stage)](session, content, context)


def kept_digest(session: Session, key: bytes, context: Context) -> str:
    """Return a digest of the alignment that a party keeps, empty if it keeps none."""
    fingerprint = session.aligned
    if not fingerprint:
        kept = KeptAlignment.load(open_store(context, session.party.name))
        fingerprint = "" if kept is None else kept.fingerprint
    return keyed_digest([fingerprint], key) if fingerprint else ""


def _settings(session: Session, context: Context) -> AlignmentSettings:
    own, party = session.settings(context), session.party
    if isinstance(party, LabelParty) and party.trust_server:
        return replace(own, trust_server=True)
    return own


def _handshake(session: Session, context: Context) -> Handshake:
    found = session.shake_hands(lambda: _settings(session, context))
    if found is None:
        problem = "was sent a message of a handshake that it takes no part in"
        raise PartyError(session.party.name, problem, REMEDY)
    return found


def _begin(session: Session, content: Content, context: Context) -> Content:
    session.drop_handshake()
    party, own = session.party, _settings(session, context)
    messages = ids_of(party.name, party.ids, own)
    invitation = unpack_invitation(content)
    session.handshake = Handshake(party.name, invitation, own, messages)
    count = len(messages) + invitation.padding
    return Content({**pack_hellos([session.handshake.hello()]), "ids": count})


def _meet(session: Session, content: Content, context: Context) -> Content:
    handshake = _handshake(session, context)
    handshake.meet(unpack_hellos(content))
    return _parts(handshake, content)


def _relay(session: Session, content: Content, context: Context) -> Content:
    handshake = _handshake(session, context)
    handshake.take(unpack_parts(content))
    return _parts(handshake, content)


def _parts(handshake: Handshake, content: Content) -> Content:
    config = pack_parts(handshake.give(content.number("limit")))
    more, exponentiations = handshake.has_more, handshake.exponentiations
    return Content({**config, "more": more, "exponentiations": exponentiations})


def _finish(session: Session, content: Content, context: Context) -> Content:
    handshake = _handshake(session, context)
    outcome = handshake.finish()
    sizes = [outcome.alignment.counts[name] for name in handshake.invitation.ring]
    config: dict[str, Value] = {
        "aligned": keyed_digest([outcome.fingerprint], digest_key(content)),
        "sizes": [*sizes, len(outcome.alignment.universe)],
    }
    return Content(config)


def _place(session: Session, content: Content, context: Context) -> Content:
    """Put the party on the rows of the alignment whose digest the strategy names."""
    party, key = session.party, digest_key(content)
    handshake = session.shake_hands(lambda: _settings(session, context))
    store = open_store(context, party.name)
    kept = KeptAlignment.load(store) if handshake is None else handshake.finish()
    agreed = unpack_invitation(content).agreed()
    if kept is None or keyed_digest([kept.fingerprint], key) != content.text("aligned"):
        problem = "does not have the alignment that it was to be placed on"
        raise PartyError(party.name, problem, REMEDY)
    if kept.fingerprint != kept.alignment.fingerprint(agreed):
        raise PartyError(
            party.name,
            "its alignment was made with another method, group, padding or other "
            "parties",
            "Resume with the settings of the first run, or start without resume",
        )
    if handshake is not None:
        kept.save(store)
        session.drop_handshake()
    session.place(kept)
    _, split = party.digests(key)
    return Content({"rows": party.rows, "split-digest": split})


def _drop(session: Session, content: Content, context: Context) -> Content:
    session.drop_handshake()
    return Content()


_STAGES: dict[Stage, Callable[[Session, Content, Context], Content]] = {
    Stage.BEGIN: _begin,
    Stage.MEET: _meet,
    Stage.RELAY: _relay,
    Stage.FINISH: _finish,
    Stage.PLACE: _place,
    Stage.DROP: _drop,
}
