"""The Flower ClientApp of every party."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from logging import ERROR

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.supercore import log

from flower_vfl.alignment.keys import AlignmentSettings, trusts_server
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.parties.base import Party
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.randomness import RandomState, derive_seed

from . import residence
from .handlers import VERBS
from .messages import Verb, error_content, read
from .replay import (
    enter,
    node_name,
    node_role,
    node_settings,
    party_of,
    safe_name,
    save,
)

PassiveFactory = Callable[[Context], PassiveParty]
LabelFactory = Callable[[Context], LabelParty]
SettingsFactory = Callable[[Context], AlignmentSettings]


def vertical_client_app(
    passive: PassiveFactory,
    label: LabelFactory,
    mods: list[Mod] | None = None,
    aligning: SettingsFactory = node_settings,
) -> ClientApp:
    """Return the one ClientApp of a vertical app; each node plays its own role in it.

    Parameters
    ----------
    passive : Callable[[Context], PassiveParty]
        Makes the party of a passive node: loads that node's data and builds its model.
        Called once per process; torch's random state is seeded from the run's seed and
        the node's name around the call.
    label : Callable[[Context], LabelParty]
        Makes the label party.
    mods : list[Mod] | None (default: None)
        Flower mods around every message.
    aligning : Callable[[Context], AlignmentSettings] (default: from the node config)
        What a node brings to an alignment of ids: its key, the pinned keys of others,
        whether it trusts the server, how it spells ids.

    Returns
    -------
    ClientApp
        For ``flwr run``, a SuperNode, or :class:`flower_vfl.InProcessGrid`.
    """
    app = ClientApp(mods=mods)

    def make(context: Context, seed: int) -> Party:
        name = node_name(context)
        role = node_role(context)
        with RandomState(derive_seed(seed, "model", name)):
            party: Party = label(context) if role == "label" else passive(context)
        if party.role != role:
            raise ConfigError(
                f"the factory of a {role} node returned a {type(party).__name__}"
            )
        party.name = party.name or name
        trust = trusts_server(context.node_config)
        if isinstance(party, LabelParty) and trust is not None:
            party.trust_server = trust
        return party

    def handle(message: Message, context: Context) -> Message:
        try:
            records = _answer(message, context, make, aligning)
        except Exception as error:
            party = party_of(context.run_id, context.node_id)
            name = party.name if party is not None else safe_name(context)
            records = _report(error, name)
        return Message(records, reply_to=message)

    registrars = {"query": app.query, "train": app.train, "evaluate": app.evaluate}
    for verb in Verb:
        category, action = verb.value.split(".")
        registrars[category](action)(handle)
    return app


def _report(error: Exception, party: str) -> RecordDict:
    """Log an error and return the reply that tells the server about it."""
    named = isinstance(error, PartyError)
    log(ERROR, "%s", error if named else f"party '{party}': {error}")
    if not isinstance(error, ConfigError | PartyError):
        log(ERROR, traceback.format_exc())
    return error_content(error, party).records()


def _answer(
    message: Message,
    context: Context,
    make: Callable[[Context, int], Party],
    aligning: SettingsFactory,
) -> RecordDict:
    """Return the reply to a message; the same one again if it was answered before."""
    verb, content = Verb(message.metadata.message_type), read(message)
    resident = residence.is_resident(context.run_id, context.node_id)
    session = enter(context, verb, content, make, resident)
    session.settings = aligning
    with session.lock:
        turn = content.number("turn")
        # A hello changes nothing, and one with the same turn may be of another server.
        again = turn == session.turn and verb is not Verb.HELLO
        if again and session.reply is not None:
            return session.reply
        if turn < session.turn and verb is not Verb.HELLO:
            raise PartyError(
                session.party.name,
                f"got request {turn} after request {session.turn}",
                "Two servers may be driving one run: stop one of them",
            )
        if session.threads and torch.get_num_threads() != session.threads:
            torch.set_num_threads(session.threads)
        session.stamp = ""  # the party may now differ from what is saved
        session.turn = turn
        try:
            session.reply = VERBS[verb](session, content, context).records()
        except Exception as error:  # kept too: half a step must not be done again
            session.reply = _report(error, session.party.name)
            if session.drop_handshake() and not resident:  # no key may be left
                save(session, context)
        else:
            if not resident:
                save(session, context)
        return session.reply
