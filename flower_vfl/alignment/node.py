"""What a party does at each stage of the alignment handshake."""

from flwr.app import Context

from flower_vfl.errors import PartyError, check_name
from flower_vfl.parties.checkpoints import open_store, writing
from flower_vfl.parties.schedule import keyed_digest
from flower_vfl.protocol.messages import Content
from flower_vfl.protocol.replay import Session

from . import messages
from .handshake import Handshake, SavedAlignment, ids_of
from .messages import Key, Stage


def align(session: Session, content: Content, context: Context) -> Content:
    """Return the reply of a party to a request of the handshake."""
    stage = content.text(Key.STAGE)
    check_name("stage", stage, list(Stage))
    if stage == Stage.BEGIN:
        return _begin(session, content, context)
    if stage == Stage.APPLY:
        return _apply(session, content, context)
    if stage == Stage.DROP:
        session.drop_handshake()
        return Content()
    handshake = session.open_handshake(context)
    if handshake is None:
        problem = "was sent a message of a handshake that it takes no part in"
        raise PartyError(session.party.name, problem, messages.REMEDY)
    if stage == Stage.FINISH:
        return _finish(handshake, content)
    if stage == Stage.KEYS:
        handshake.exchange_keys(messages.unpack_hellos(content))
    else:
        handshake.receive(messages.unpack_chunks(content))
    chunks = messages.pack_chunks(handshake.next_chunks(content.number(Key.LIMIT)))
    done = {Key.EXPONENTIATIONS: handshake.exponentiations}
    return Content({**chunks, Key.MORE: handshake.has_more, **done})


def _begin(session: Session, content: Content, context: Context) -> Content:
    session.drop_handshake()
    party, own = session.party, session.own_settings(context)
    ids = ids_of(party.name, party.ids, own)
    config = messages.unpack_handshake(content)
    session.handshake = Handshake(party.name, config, own, ids)
    keys = messages.pack_hellos([session.handshake.hello()])
    return Content({**keys, Key.IDS: len(ids) + config.padding})


def _finish(handshake: Handshake, content: Content) -> Content:
    """Delete the keys and return what must be equal at all parties."""
    found = handshake.finish()
    key = messages.read_bytes(content, Key.DIGEST_KEY)
    sizes = [found.aligned.counts[name] for name in handshake.config.ring]
    sizes.append(len(found.aligned.universe))
    digest = keyed_digest([found.fingerprint], key)
    return Content({Key.ALIGNED: digest, Key.SIZES: sizes})


def _apply(session: Session, content: Content, context: Context) -> Content:
    """Align the party's rows by the alignment whose digest the strategy names."""
    party, key = session.party, messages.read_bytes(content, Key.DIGEST_KEY)
    handshake = session.open_handshake(context)
    store = open_store(context, party.name)
    found = SavedAlignment.load(store) if handshake is None else handshake.finish()
    named = content.text(Key.ALIGNED)
    if found is None or keyed_digest([found.fingerprint], key) != named:
        problem = "does not have the alignment that the strategy names"
        raise PartyError(party.name, problem, messages.REMEDY)
    agreed = messages.unpack_handshake(content).agreed()
    if found.fingerprint != found.aligned.fingerprint(agreed):
        made = "made with another method, group, padding or other parties"
        remedy = "Resume with the settings of the first run, or start without resume"
        raise PartyError(party.name, f"its alignment was {made}", remedy)
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
