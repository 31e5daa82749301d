"""Parties that live in this process, their last replies, and how both are restored."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from flwr.app import ConfigRecord, Context, RecordDict

from flower_vfl.alignment import AlignmentSettings
from flower_vfl.alignment.handshake import Handshake, SavedAlignment
from flower_vfl.errors import ConfigError, PartyRestartedError, check_name
from flower_vfl.parties.base import Party
from flower_vfl.parties.checkpoints import from_bytes, open_store, to_bytes
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.policies import NodePolicy

from .config import Greeting, Role, TrainingConfig
from .messages import Content, Verb
from .sealing import Seals

_STATE, _CONFIG, _SEALS = "flower_vfl.state", "flower_vfl.config", "flower_vfl.seals"
_REPLY, _HANDSHAKE = "flower_vfl.reply.", "flower_vfl.alignment.handshake"


def node_role(context: Context) -> Role:
    """Return the role of a node."""
    config = context.node_config
    if "role" not in config and "partition-id" in config:
        return "label" if int(config["partition-id"]) == 0 else "passive"
    if config.get("role") is None:
        raise ConfigError(
            f"node {context.node_id} has no role; start its SuperNode with "
            "--node-config 'role=\"label\"' or 'role=\"passive\"'"
        )
    check_name("role", str(config["role"]), ("label", "passive"))
    return cast(Role, config["role"])


def node_name(context: Context) -> str:
    """Return the name of a node's party."""
    if (name := context.node_config.get("name")) is not None:
        return str(name)
    number = context.node_config.get("partition-id", context.node_id)
    return "label" if node_role(context) == "label" else f"passive-{number}"


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
    # By turn: as many of the last replies as can be under way.
    replies: dict[int, RecordDict] = field(default_factory=dict)
    config: TrainingConfig | None = None
    stamp: str = ""  # of the saved state that it equals; empty if there is none
    handshake: Handshake | None = None  # that is going on
    saved_handshake: bytes = b""  # from another process, until it is asked for
    aligned: str = ""  # fingerprint of the alignment on whose rows the party is
    settings: Callable[[Context], AlignmentSettings] = node_settings
    policy: NodePolicy = field(default_factory=NodePolicy)
    restores: int = 0  # how often the run went back, was configured again, or failed
    renewed: bool = False  # configured again, and not restored since
    data: str = ""  # digest of the party's rows, once a checkpoint needed it
    seals: Seals | None = None  # keys of sealed training; None if it is not sealed
    lock: threading.Lock = field(default_factory=threading.Lock)

    def own_settings(self, context: Context) -> AlignmentSettings:
        """Return the node's settings of an alignment or a key exchange."""
        own, party = self.settings(context), self.party
        trusts = isinstance(party, LabelParty) and party.trust_server
        return replace(own, trust_server=True) if trusts else own

    def open_handshake(self, context: Context) -> Handshake | None:
        """Return the handshake that is going on, if any."""
        if self.saved_handshake:
            saved, party = self.saved_handshake, self.party
            own = self.own_settings(context)
            self.handshake = Handshake.restore(saved, party.name, own, party.ids)
            self.saved_handshake = b""
        return self.handshake

    def drop_handshake(self) -> bool:
        """Forget a handshake and its keys; return whether there was one."""
        found = self.handshake is not None or bool(self.saved_handshake)
        if self.handshake is not None:
            self.handshake.close()
        self.handshake, self.saved_handshake = None, b""
        return found

    def go_back(self) -> None:
        """Count that rows of this run may be trained on anew, or refuse it."""
        self.restores += 1
        self.policy.check_restores(self.party.name, self.restores)

    def place(self, kept: SavedAlignment) -> None:
        """Put the party on aligned rows."""
        if kept.fingerprint != self.aligned:
            self.party.place(RowIndex.from_aligned_ids(kept.aligned))
            self.aligned = kept.fingerprint


Maker = Callable[[Context, Greeting], Session]
sessions: dict[tuple[int, int], Session] = {}  # by run and node


def forget(run_id: int) -> None:
    """Drop every party of a run that lives in this process."""
    for key in [key for key in list(sessions) if key[0] == run_id]:  # others may add
        sessions.pop(key, None)


def enter(context: Context, verb: Verb, content: Content, make: Maker) -> Session:
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
            session = make(context, Greeting.from_record(content.config))
            sessions[key] = session
        return session
    if session is None:
        sessions[key] = session = make(context, Greeting.from_record(saved))
        session.threads = cast(int, saved["threads"])
    load(session, context, saved)
    return session


def save(session: Session, context: Context) -> None:
    """Keep a party in its node's Flower state, for runtimes that keep no process."""
    party, config = session.party, session.config
    session.stamp = secrets.token_hex(8)
    kept: dict[str, Any] = {
        _STATE: ConfigRecord(
            {
                "stamp": session.stamp,
                "turn": session.turn,
                **asdict(session.greeting),
                "restores": session.restores,
                "renewed": session.renewed,
                "threads": session.threads,
                "aligned": session.aligned,
                "state": b"" if config is None else to_bytes(party.state_dict()),
            }
        )
    }
    if config is not None:
        kept[_CONFIG] = ConfigRecord(cast(Any, config.to_record()))
    if session.handshake is not None:
        kept[_HANDSHAKE] = ConfigRecord({"state": session.handshake.save()})
        session.handshake = None  # this process may never hear of its end
    if session.seals is not None:
        kept[_SEALS] = ConfigRecord({"state": to_bytes(vars(session.seals))})
    for turn, reply in session.replies.items():
        kept |= {f"{_REPLY}{turn}.{key}": record for key, record in reply.items()}
    ours = _STATE, _CONFIG, _HANDSHAKE, _SEALS, _REPLY
    for key in [key for key in context.state if key.startswith(ours)]:
        del context.state[key]
    context.state.update(kept)


def load(session: Session, context: Context, saved: ConfigRecord) -> None:
    """Bring a party to where its node's Flower state says it is."""
    _find_handshake(session, context)
    if (aligned := saved["aligned"]) != session.aligned:
        kept = SavedAlignment.load(open_store(context, session.party.name))
        if kept is None or kept.fingerprint != aligned:
            problem = "has lost the alignment of this run"
            remedy = "Two runs may share its state-dir: start again without resume"
            raise PartyRestartedError(session.party.name, problem, remedy)
        session.place(kept)
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
    session.renewed = cast(bool, saved["renewed"])
    session.replies = {}
    for name, record in context.state.items():
        if name.startswith(_REPLY):
            turn, key = name.removeprefix(_REPLY).split(".", 1)
            session.replies.setdefault(int(turn), RecordDict())[key] = record


def _find_handshake(session: Session, context: Context) -> None:
    """Take over the handshake in a node's Flower state, if there is one."""
    record = cast(ConfigRecord | None, context.state.get(_HANDSHAKE))
    session.saved_handshake = cast(bytes, record["state"]) if record else b""
