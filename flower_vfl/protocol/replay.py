"""Parties that live in this process, their last replies, and how both are restored.

On Flower's stateless runtimes a party is kept in ``context.state`` after every message,
elsewhere in memory (`flower_vfl.protocol.residence`).
"""

import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from flwr.app import ConfigRecord, Context, RecordDict

from flower_vfl.alignment import AlignmentSettings
from flower_vfl.alignment.handshake import Handshake, SavedAlignment
from flower_vfl.alignment.messages import pack_hellos, unpack_hellos
from flower_vfl.errors import ConfigError, PartyRestartedError, check_name
from flower_vfl.parties.base import Party
from flower_vfl.parties.checkpoints import from_bytes, open_store, to_bytes
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.policies import NodePolicy

from .config import Greeting, Role, TrainingConfig
from .messages import Content, Verb
from .residence import RESIDENT as RESIDENT
from .sealing import Seals, new_seals

_STATE = "flower_vfl.state"
_CONFIG = "flower_vfl.config"
_REPLY = "flower_vfl.reply."
_HANDSHAKE = "flower_vfl.alignment.handshake"
_SEALS = "flower_vfl.seals"


def node_role(context: Context) -> Role:
    """Return the role of a node."""
    node, role = f"node {context.node_id}", context.node_config.get("role")
    if role is None:
        if "partition-id" not in context.node_config:
            raise ConfigError(
                f"{node} has no role; start its SuperNode with --node-config "
                "'role=\"label\"' or 'role=\"passive\"'"
            )
        return "label" if int(context.node_config["partition-id"]) == 0 else "passive"
    check_name("role", str(role), ("label", "passive"))
    return cast(Role, role)


def node_name(context: Context) -> str:
    """Return the name of a node's party."""
    name = context.node_config.get("name")
    if name is not None:
        return str(name)
    if node_role(context) == "label":
        return "label"
    return f"passive-{context.node_config.get('partition-id', context.node_id)}"


def safe_name(context: Context) -> str:
    """Return a name for an error message, even for a node without a role."""
    try:
        return node_name(context)
    except ConfigError:
        return f"node-{context.node_id}"


def node_settings(context: Context) -> AlignmentSettings:
    """Return what a node brings to an alignment, from its node config."""
    return AlignmentSettings.from_node(context.node_config)


@dataclass
class Session:
    """A party that lives in this process, and its last replies."""

    party: Party
    greeting: Greeting
    threads: int = 0
    turn: int = 0
    # By turn: the last reply, or as many as can be under way in a pipelined run.
    replies: dict[int, RecordDict] = field(default_factory=dict)
    config: TrainingConfig | None = None
    stamp: str = ""  # of the saved state that it equals; empty if there is none
    handshake: Handshake | None = None  # that is going on
    saved_handshake: bytes = b""  # from another process, until it is asked for
    aligned: str = ""  # fingerprint of the alignment on whose rows the party is
    settings: Callable[[Context], AlignmentSettings] = node_settings
    policy: NodePolicy = field(default_factory=NodePolicy)
    restores: int = 0  # how often the run went back to a checkpoint
    data: str = ""  # digest of the party's rows, once a checkpoint needed it
    seals: Seals | None = None  # keys of sealed training; None if it is not sealed
    lock: threading.Lock = field(default_factory=threading.Lock)

    def own_settings(self, context: Context) -> AlignmentSettings:
        """Return the node's settings of an alignment or a key exchange."""
        own, party = self.settings(context), self.party
        if isinstance(party, LabelParty) and party.trust_server:
            return replace(own, trust_server=True)
        return own

    def begin_exchange(
        self, content: Content, config: TrainingConfig, context: Context
    ) -> tuple[Seals | None, Content]:
        """Return the seals of a sealed run and a reply with the party's public keys."""
        if not config.sealed:
            return None, Content()
        party, label = self.party, content.text("label")
        seals = new_seals(party.name, party.role, label, config, self.aligned)
        return seals, Content(pack_hellos([seals.hello(self.own_settings(context))]))

    def exchange_keys(self, content: Content, context: Context) -> Content:
        """Derive the keys of sealed training from the public keys of the other side."""
        if self.seals is None:
            raise ConfigError("this run is not sealed; configure it as one first")
        self.seals.exchange_keys(unpack_hellos(content), self.own_settings(context))
        return Content()

    def open_handshake(self, own: Callable[[], AlignmentSettings]) -> Handshake | None:
        """Return the handshake that is going on, if any."""
        if self.saved_handshake:
            saved, party = self.saved_handshake, self.party
            self.handshake = Handshake.restore(saved, party.name, own(), party.ids)
            self.saved_handshake = b""
        return self.handshake

    def drop_handshake(self) -> bool:
        """Forget a handshake and its keys; return whether there was one."""
        found = self.handshake is not None or bool(self.saved_handshake)
        if self.handshake is not None:
            self.handshake.close()
        self.handshake, self.saved_handshake = None, b""
        return found

    def place(self, kept: SavedAlignment) -> None:
        """Put the party on aligned rows."""
        if kept.fingerprint != self.aligned:
            self.party.place(RowIndex.from_aligned_ids(kept.aligned))
            self.aligned = kept.fingerprint


sessions: dict[tuple[int, int], Session] = {}


def forget(run_id: int) -> None:
    """Drop every party of a run that lives in this process."""
    for key in [key for key in sessions if key[0] == run_id]:
        sessions.pop(key, None)


def party_of(run_id: int, node_id: int) -> Party | None:
    """Return a party that lives in this process, or None."""
    session = sessions.get((run_id, node_id))
    return None if session is None else session.party


def enter(
    context: Context,
    verb: Verb,
    content: Content,
    make: Callable[[Context, Greeting], Session],
) -> Session:
    """Return the party of this node, from memory or from its Flower state."""
    key = (context.run_id, context.node_id)
    session = sessions.get(key)
    saved = cast(ConfigRecord | None, context.state.get(_STATE))
    if session is not None and saved is not None and saved["stamp"] == session.stamp:
        _find_handshake(session, context)
        return session
    if saved is None:
        if verb is not Verb.HELLO:
            problem = f"got '{verb}' before the hello of this run"
            remedy = "Its process may have been restarted: start the run again"
            raise PartyRestartedError(safe_name(context), problem, remedy)
        if session is None:
            greeting = Greeting.from_record(content.config)
            sessions[key] = session = make(context, greeting)
        return session
    if session is None:
        sessions[key] = session = make(context, Greeting.from_record(saved))
        session.threads = cast(int, saved["threads"])
    load(session, context, saved)
    return session


def save(session: Session, context: Context) -> None:
    """Keep a party in its node's Flower state, for runtimes that keep no process."""
    configured = session.config is not None
    session.stamp = secrets.token_hex(8)
    context.state[_STATE] = ConfigRecord(
        {
            "stamp": session.stamp,
            "turn": session.turn,
            **asdict(session.greeting),
            "restores": session.restores,
            "threads": session.threads,
            "aligned": session.aligned,
            "state": to_bytes(session.party.state_dict()) if configured else b"",
        }
    )
    context.state.pop(_CONFIG, None)
    if session.config is not None:
        context.state[_CONFIG] = ConfigRecord(cast(Any, session.config.to_record()))
    context.state.pop(_HANDSHAKE, None)
    if session.handshake is not None:
        secret = ConfigRecord({"state": session.handshake.save()})
        context.state[_HANDSHAKE] = secret
        session.handshake = None  # this process may never hear of its end
    context.state.pop(_SEALS, None)
    if session.seals is not None:
        context.state[_SEALS] = ConfigRecord({"state": to_bytes(vars(session.seals))})
    for key in [key for key in context.state if key.startswith(_REPLY)]:
        del context.state[key]
    for turn, reply in session.replies.items():
        for key, record in reply.items():
            context.state[f"{_REPLY}{turn}.{key}"] = record


def load(session: Session, context: Context, saved: ConfigRecord) -> None:
    """Bring a party to where its node's Flower state says it is."""
    _find_handshake(session, context)
    _load_alignment(session, context, cast(str, saved["aligned"]))
    if session.config is None:
        session.party.describe(b"")  # prepares the labels
    if _CONFIG in context.state:
        config = TrainingConfig.from_record(cast(ConfigRecord, context.state[_CONFIG]))
        if session.config != config or session.party.schedule is None:
            session.party.configure(config)
            session.config = config
        session.party.load_state_dict(from_bytes(cast(bytes, saved["state"])))
    seals = cast(ConfigRecord | None, context.state.get(_SEALS))
    session.seals = Seals(**from_bytes(cast(bytes, seals["state"]))) if seals else None
    session.turn, session.stamp = cast(int, saved["turn"]), cast(str, saved["stamp"])
    session.restores = cast(int, saved["restores"])
    session.replies = {}
    for name, record in context.state.items():
        if name.startswith(_REPLY):
            turn, key = name.removeprefix(_REPLY).split(".", 1)
            session.replies.setdefault(int(turn), RecordDict())[key] = record


def _find_handshake(session: Session, context: Context) -> None:
    """Take over the handshake in a node's Flower state, if there is one."""
    record = cast(ConfigRecord | None, context.state.get(_HANDSHAKE))
    session.saved_handshake = cast(bytes, record["state"]) if record else b""


def _load_alignment(session: Session, context: Context, aligned: str) -> None:
    """Bring a party to the aligned rows that it was on."""
    if aligned == session.aligned:
        return
    kept = SavedAlignment.load(open_store(context, session.party.name))
    if kept is None or kept.fingerprint != aligned:
        problem = "has lost the alignment of this run"
        remedy = "Two runs may share its state-dir: start again without resume"
        raise PartyRestartedError(session.party.name, problem, remedy)
    session.place(kept)
