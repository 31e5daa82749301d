"""What a party does in the key exchange of sealed training."""

from flwr.app import Context

from flower_vfl.alignment.messages import pack_hellos, unpack_hellos
from flower_vfl.errors import ConfigError

from .config import TrainingConfig
from .messages import Content
from .replay import Session
from .sealing import Seals, new_seals


def begin_exchange(
    session: Session, content: Content, config: TrainingConfig, context: Context
) -> tuple[Seals | None, Content]:
    """Return the seals of a sealed run and a reply with the party's public keys."""
    if not config.sealed:
        return None, Content()
    party, label = session.party, content.text("label")
    seals = new_seals(party.name, party.role, label, config, session.aligned)
    hello = seals.hello(session.own_settings(context))
    return seals, Content(pack_hellos([hello]))


def exchange_keys(session: Session, content: Content, context: Context) -> Content:
    """Derive the keys of sealed training from the public keys of the other side."""
    if session.seals is None:
        raise ConfigError("this run is not sealed; configure it as one first")
    own = session.own_settings(context)
    session.seals.exchange_keys(unpack_hellos(content), own)
    return Content()
