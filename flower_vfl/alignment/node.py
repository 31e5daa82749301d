"""What a party does at each stage of the alignment handshake."""

from flwr.app import Context

from flower_vfl.errors import PartyError, unknown_name
from flower_vfl.parties.checkpoints import open_store, writing
from flower_vfl.parties.digests import keyed_digest
from flower_vfl.protocol.messages import Content
from flower_vfl.protocol.replay import Session

from .handshake import Handshake, SavedAlignment, ids_of
from .messages import (
    REMEDY,
    Key,
    Stage,
    pack_chunks,
    pack_hellos,
    read_bytes,
    unpack_chunks,
    unpack_handshake,
    unpack_hellos,
)


def align(session: Session, content: Content, context: Context) -> Content:
    """Return the reply of a party to a request of the handshake."""
    stage = content.text(Key.STAGE)
    if stage == Stage.BEGIN:
        return _begin(session, content, context)
    if stage == Stage.KEYS:
        handshake = _handshake(session, context)
        handshake.exchange_keys(unpack_hellos(content))
        return _next_chunks(handshake, content)
    if stage == Stage.RELAY:
        handshake = _handshake(session, context)
        handshake.receive(unpack_chunks(content))
        return _next_chunks(handshake, content)
    if stage == Stage.FINISH:
        return _finish(_handshake(session, context), content)
    if stage == Stage.APPLY:
        return _apply(session, content, context)
    if stage == Stage.DROP:
        session.drop_handshake()
        return Content()
    raise unknown_name("stage", stage, list(Stage))


def _begin(session: Session, content: Content, context: Context) -> Content:
    """Start a handshake and return the party's public keys."""
    session.drop_handshake()
    party, own = session.party, session.own_settings(context)
    ids = ids_of(party.name, party.ids, own)
    config = unpack_handshake(content)
    session.handshake = Handshake(party.name, config, own, ids)
    hello = session.handshake.hello()
    return Content({**pack_hellos([hello]), Key.IDS: len(ids) + config.padding})


def _next_chunks(handshake: Handshake, content: Content) -> Content:
    """Return the next chunks of lists that the party sends."""
    chunks = handshake.next_chunks(content.number(Key.LIMIT))
    return Content(
        {
            **pack_chunks(chunks),
            Key.MORE: handshake.has_more,
            Key.EXPONENTIATIONS: handshake.exponentiations,
        }
    )


def _finish(handshake: Handshake, content: Content) -> Content:
    """Delete the keys and return what must be equal at all parties."""
    found = handshake.finish()
    key = read_bytes(content, Key.DIGEST_KEY)
    sizes = [found.aligned.counts[name] for name in handshake.config.ring]
    return Content(
        {
            Key.ALIGNED: keyed_digest([found.fingerprint], key),
            Key.SIZES: [*sizes, len(found.aligned.universe)],
        }
    )


def _apply(session: Session, content: Content, context: Context) -> Content:
    """Align the party's rows by the alignment whose digest the strategy names."""
    party, key = session.party, read_bytes(content, Key.DIGEST_KEY)
    handshake = session.open_handshake(lambda: session.own_settings(context))
    store = open_store(context, party.name)
    found = SavedAlignment.load(store) if handshake is None else handshake.finish()
    named = content.text(Key.ALIGNED)
    if found is None or keyed_digest([found.fingerprint], key) != named:
        problem = "does not have the alignment that the strategy names"
        raise PartyError(party.name, problem, REMEDY)
    if found.fingerprint != found.aligned.fingerprint(
        unpack_handshake(content).agreed()
    ):
        raise PartyError(
            party.name,
            "its alignment was made with another method, group, padding or other "
            "parties",
            "Resume with the settings of the first run, or start without resume",
        )
    if handshake is not None:
        with writing(party.name, "alignment"):
            found.save(store)
        session.drop_handshake()
    session.place(found)
    _, split = party.digests(key)
    return Content({Key.ROWS: party.rows, Key.SPLIT_DIGEST: split})


def saved_digest(session: Session, key: bytes, context: Context) -> str:
    """Return a digest of the alignment that a party has saved, empty if none."""
    fingerprint = session.aligned
    if not fingerprint:
        saved = SavedAlignment.load(open_store(context, session.party.name))
        fingerprint = "" if saved is None else saved.fingerprint
    return keyed_digest([fingerprint], key) if fingerprint else ""


def _handshake(session: Session, context: Context) -> Handshake:
    found = session.open_handshake(lambda: session.own_settings(context))
    if found is None:
        problem = "was sent a message of a handshake that it takes no part in"
        raise PartyError(session.party.name, problem, REMEDY)
    return found
