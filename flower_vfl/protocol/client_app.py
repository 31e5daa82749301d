"""The Flower ClientApp of every party: what a node does for each message."""

import functools
import importlib.metadata
import traceback
from collections.abc import Callable
from dataclasses import replace
from logging import ERROR, INFO

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.supercore import log

from flower_vfl.alignment.keys import AlignmentSettings, trusts_server
from flower_vfl.alignment.messages import pack_hellos, unpack_hellos
from flower_vfl.alignment.node import align, saved_digest
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.base import Party
from flower_vfl.parties.checkpoints import open_store
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.policies import NodePolicy, reported, untrusted
from flower_vfl.parties.schedule import SPLITS
from flower_vfl.randomness import Noise, RandomState, derive_seed, draw_secret

from . import replay
from .checkpoints import keep, restore
from .config import Greeting, TrainingConfig
from .messages import (
    CLEAN,
    GRADIENT,
    VERSION,
    Content,
    TensorArray,
    Verb,
    error_content,
    read,
    reply_to,
    to_floats,
    to_tensor,
)
from .probing import probe, refuse_probe
from .replay import Session
from .residence import PLAINTEXT, RESIDENT
from .sealing import TRAINING, evaluation_use, new_seals
from .serving import serve


def vertical_client_app(
    passive: Callable[[Context], PassiveParty],
    label: Callable[[Context], LabelParty],
    *,
    mods: list[Mod] | None = None,
    alignment: Callable[[Context], AlignmentSettings] = replay.node_settings,
    policy: Callable[[Context], NodePolicy] | None = None,
) -> ClientApp:
    """Return the one ClientApp of a vertical app; each node plays its own role in it.

    It is for ``flwr run``, a SuperNode, or :class:`flower_vfl.InProcessGrid`.

    Parameters
    ----------
    passive : Callable[[Context], PassiveParty]
        Makes the party of a passive node: loads that node's data and builds its model.
        Called once per process; torch's random state is seeded from the run's seed and
        the node's name around the call.
    label : Callable[[Context], LabelParty]
        Makes the label party. torch's random state around the call is a secret, unless
        a simulation is to be repeatable (see `noise_seed` of
        :class:`flower_vfl.strategies.Defense`).
    mods : list[Mod] | None (default: None)
        Flower mods around every message.
    alignment : Callable[[Context], AlignmentSettings] (default: from the node config)
        What a node brings to an alignment of ids.
    policy : Callable[[Context], NodePolicy] | None (default: None)
        What a node allows the server. None takes it from the node config, where a label
        party that does not trust the server starts from ``NodePolicy.strict()``; a node
        with a ``partition-id`` is one of a simulation and allows everything.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from flower_vfl import CrossEntropy, LabelParty, PassiveParty
    >>> from flower_vfl import vertical_client_app
    >>> def passive(context):
    ...     return PassiveParty(torch.randn(100, 6), nn.Linear(6, 4))
    >>> def label(context):
    ...     return LabelParty(torch.randint(2, (100,)), CrossEntropy(nn.Linear(4, 1)))
    >>> app = vertical_client_app(passive, label)
    """
    app = ClientApp(mods=mods)

    def make(context: Context, greeting: Greeting) -> Session:
        role = replay.node_role(context)
        build = label if role == "label" else passive
        with RandomState(_first_weights(context, greeting)):
            party: Party = build(context)
        if isinstance(party, LabelParty) and party.protects and not greeting.defended:
            greeting = replace(greeting, defended=True)
            with RandomState(_first_weights(context, greeting)):
                party = build(context)
        if party.role != role:
            made = type(party).__name__
            raise ConfigError(f"the factory of a {role} node returned a {made}")
        party.name = party.name or replay.node_name(context)
        trust = trusts_server(context.node_config)
        if isinstance(party, LabelParty) and trust is not None:
            party.trust_server = trust
        if policy is None:
            untrusting = isinstance(party, LabelParty) and not party.trust_server
            strict = untrusting and "partition-id" not in context.node_config
            allowed = NodePolicy.from_node(context.node_config, strict)
        else:
            allowed = policy(context)
        return Session(party, greeting, settings=alignment, policy=allowed)

    def handle(message: Message, context: Context) -> Message:
        try:
            records = _answer(message, context, make)
        except Exception as error:
            session = replay.sessions.get((context.run_id, context.node_id))
            name = session.party.name if session else replay.safe_name(context)
            records = _report(error, name)
        return reply_to(message, records)

    registrars = {"query": app.query, "train": app.train, "evaluate": app.evaluate}
    for verb in Verb:
        category, action = verb.value.split(".")
        registrars[category](action)(handle)
    return app


def _first_weights(context: Context, greeting: Greeting) -> int | Noise:
    """Return what a party's first weights are drawn from."""
    if replay.node_role(context) == "label":
        trusts = trusts_server(context.node_config)
        if trusts is None:
            trusts = "partition-id" in context.node_config  # of a simulation
        hidden = greeting.defended and not greeting.repeatable
        if hidden or not trusts:  # a party that knows them finds labels sooner
            return Noise(draw_secret(), "weights")
    return derive_seed(greeting.seed, "model", replay.node_name(context))


def _report(error: Exception, party: str) -> RecordDict:
    """Log an error and return the reply that tells the server about it."""
    where = "" if isinstance(error, PartyError) else f"party '{party}': "
    log(ERROR, "%s%s", where, error)
    if not isinstance(error, ConfigError | PartyError):
        log(ERROR, traceback.format_exc())
    return error_content(error, party).records()


def _answer(message: Message, context: Context, make: replay.Maker) -> RecordDict:
    """Return the reply to a message; the same one again if it was answered before."""
    verb, content = Verb(message.metadata.message_type), read(message)
    resident = RESIDENT in context.__dict__
    session = replay.sessions.get((context.run_id, context.node_id))
    if session is None or not resident:
        session = replay.enter(context, verb, content, make)
    if session.policy.require_tls and context.__dict__.get(RESIDENT) == PLAINTEXT:
        raise session.policy.needs_tls(session.party.name)
    with session.lock:
        # A hello changes nothing, and one with the same turn may be of another server.
        replies = session.replies
        if verb is Verb.HELLO:
            replies.clear()
        elif content.turn <= session.turn:
            if content.turn in replies:
                return replies[content.turn]
            if content.turn < session.turn:
                problem = f"got request {content.turn} after request {session.turn}"
                remedy = "Two servers may be driving one run: stop one of them"
                raise PartyError(session.party.name, problem, remedy)
        if session.threads and torch.get_num_threads() != session.threads:
            torch.set_num_threads(session.threads)
        session.stamp = ""  # the party may now differ from what is saved
        session.turn = content.turn
        if len(replies) >= (session.config.under_way if session.config else 1):
            del replies[min(replies)]
        changed = True
        try:
            reply = HANDLERS[verb](session, content, context).records()
        except Exception as error:  # kept too: half a step must not be done again
            reply = _report(error, session.party.name)
            changed = session.drop_handshake()  # no key may be left
            if verb is Verb.TRAIN_STEP:  # that it fails may depend on labels
                session.restores, changed = session.restores + 1, True
        replies[content.turn] = reply
        if changed and not resident:
            replay.save(session, context)
        return reply


@functools.cache  # reading them takes milliseconds, and they do not change
def versions() -> str:
    """Return the versions of the packages that must match between parties."""
    names = ("flower-vfl", "flwr", "torch")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _hello(session: Session, content: Content, context: Context) -> Content:
    key = content.config["key"]
    if not isinstance(key, bytes):
        raise ConfigError("message entry 'key' must be bytes")
    session.threads = content.number("threads")
    session.drop_handshake()  # of a run that is over
    description = session.party.describe(key)
    if "align" in content.config:  # rows are compared when they are aligned
        reuse = content.text("align") == "reuse"
        kept = saved_digest(session, key, context) if reuse else ""
        description = replace(description, ids_digest="", split_digest="", aligned=kept)
    open_store(context, session.party.name).clean()
    record = description.to_record()
    return Content({**record, "protocol": VERSION, "versions": versions()})


def _configure(session: Session, content: Content, context: Context) -> Content:
    config = TrainingConfig.from_record(content.config)
    party = session.party
    session.policy.check_run(party.name, config)
    if session.config is not None:
        session.go_back()
        session.renewed = True
    seals, reply = None, Content()
    if config.sealed:
        label = content.text("label")
        session.policy.check_reader(party.name, label)
        seals = new_seals(party.name, party.role, label, config, session.aligned)
        reply = Content(pack_hellos([seals.hello(session.own_settings(context))]))
    try:
        party.configure(config)
        schedule = party.configured()
        session.policy.check_batches(party.name, schedule)
    except Exception:
        party.schedule = None  # no step of a run that was refused
        raise
    session.config, session.seals = config, seals
    reply.config.update({split: schedule.size(split) for split in SPLITS})
    return reply


def _seal(session: Session, content: Content, context: Context) -> Content:
    """Derive the keys of sealed training from the public keys of the other side."""
    if session.seals is None:
        raise ConfigError("this run is not sealed; configure it as one first")
    session.seals.exchange_keys(unpack_hellos(content), session.own_settings(context))
    return Content()


def _passive(session: Session) -> PassiveParty:
    if not isinstance(session.party, PassiveParty):
        raise ConfigError(f"party '{session.party.name}' is not a passive party")
    return session.party


def _label(session: Session) -> LabelParty:
    if not isinstance(session.party, LabelParty):
        raise ConfigError(f"party '{session.party.name}' is not the label party")
    return session.party


def _backward(session: Session, content: Content, context: Context) -> Content:
    """Train on the gradient that a request brings, if it brings one."""
    if not content.gradient_step:
        return Content()
    party, step = _passive(session), content.gradient_step
    array = content.arrays.get(GRADIENT)
    if session.seals is not None:
        refuse_probe(party.name, content)
        gradient = session.seals.answered(array, TRAINING, step)
    elif array is None:
        gradient = None
    else:
        gradient = to_floats(array) if party.codec is None else to_tensor(array)
    if "probe" in content.config:
        return Content(measured=probe(party, step, gradient, content))
    party.backward(step, gradient)
    return Content()


def _forward(session: Session, content: Content, context: Context) -> Content:
    party = _passive(session)
    reply = _backward(session, content, context)
    at = content.step, content.epoch, content.index
    if "probe" in content.config:
        layers = Leakage.from_text(content.text("probe")).layers
        output = party.forward(*at, probed=layers)
    else:
        output = party.forward(*at)
    if party.encoder is not None:
        output = party.encode(output, content.step, content.index)
    if session.seals is None:
        reply.arrays = {party.name: TensorArray(output)}
    else:
        reply.arrays = {party.name: session.seals.embedding(output, TRAINING, *at)}
    return reply


def _embed(session: Session, content: Content, context: Context) -> Content:
    reply = _backward(session, content, context)
    party = _passive(session)
    split, index = content.text("split"), content.index
    embedding = party.embed(split, index)
    if session.seals is None:
        reply.arrays = {party.name: TensorArray(embedding)}
    else:
        at = evaluation_use(split), party.step, 0, index
        reply.arrays = {party.name: session.seals.embedding(embedding, *at)}
    return reply


def _train_step(session: Session, content: Content, context: Context) -> Content:
    party = _label(session)
    if session.restores:  # steps that failed are among them
        session.policy.check_restores(party.name, session.restores)
    wants_labels = bool(content.config.get("labels", False))
    if wants_labels and not party.trust_server:
        raise untrusted(party.name, "labels", content.step)
    at = content.step, content.epoch, content.index
    late = bool(content.config.get("late"))
    seals, arrays = session.seals, content.arrays
    if seals is None:
        embeddings = content.tensors(party.codec is not None)
        result = party.train_step(*at, embeddings, late)
        arrays = {name: TensorArray(g) for name, g in result.gradients.items()}
        if wants_labels and not party.defender.idle:
            found = result.clean.items()
            arrays |= {f"{CLEAN}/{name}": TensorArray(g) for name, g in found}
    else:
        embeddings = seals.embeddings(arrays, TRAINING, *at)
        result = party.train_step(*at, embeddings, late)
        arrays = seals.answers(result.gradients, TRAINING, content.step)
    metrics, measured = {**result.metrics, "loss": result.loss}, result.measured
    if not session.policy.reports_all:
        metrics = reported(metrics, session.policy.report_loss)
        measured = session.policy.measured(measured)
    withheld = [name for name in content.arrays if name not in arrays]
    return Content(
        {"withheld": withheld} if withheld else {},
        arrays,
        metrics={**metrics, "rows": float(result.rows)},
        labels=TensorArray(result.labels) if wants_labels else None,
        measured=measured,
    )


def _evaluate(session: Session, content: Content, context: Context) -> Content:
    party, split, embeddings = _evaluated(session, content)
    policy = session.policy
    metrics = party.evaluate(split, content.index, embeddings)
    if metrics and policy.report_metrics != "all":  # its owner sees them here
        log(INFO, "%s: %s", split, metrics)
    return Content(metrics=reported(metrics, policy.report_metrics))


def _evaluated(
    session: Session, content: Content
) -> tuple[LabelParty, str, dict[str, torch.Tensor]]:
    """Return the label party, the split that is evaluated, and its embeddings."""
    party, split = _label(session), content.text("split")
    session.policy.check_evaluation(party.name, party.configured().size(split))
    if session.seals is None:
        return party, split, content.tensors(party.codec is not None)
    at = evaluation_use(split), party.step, 0, content.index
    return party, split, session.seals.embeddings(content.arrays, *at)


def _predict(session: Session, content: Content, context: Context) -> Content:
    party, split, embeddings = _evaluated(session, content)
    predictions = party.predict(split, content.index, embeddings)
    leaving = session.policy.predictions(party.name, predictions)
    return Content(arrays={"predictions": TensorArray(leaving)})


def _checkpoint(session: Session, content: Content, context: Context) -> Content:
    reply = _backward(session, content, context)
    reply.config["digest"] = keep(session, content, context)
    return reply


HANDLERS: dict[Verb, Callable[[Session, Content, Context], Content]] = {
    Verb.HELLO: _hello,
    Verb.ALIGN: align,
    Verb.CONFIGURE: _configure,
    Verb.SEAL: _seal,
    Verb.FORWARD: _forward,
    Verb.TRAIN_STEP: _train_step,
    Verb.BACKWARD: _backward,
    Verb.EMBED: _embed,
    Verb.EVALUATE: _evaluate,
    Verb.PREDICT: _predict,
    Verb.SERVE: serve,
    Verb.CHECKPOINT: _checkpoint,
    Verb.RESTORE: restore,
}
