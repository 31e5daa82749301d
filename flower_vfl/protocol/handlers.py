"""What a party does for each message: unpack, call the party, pack."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from flwr.app import Context

from flower_vfl.alignment.node import align, kept_digest
from flower_vfl.defender import untrusted
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.objectives import Task
from flower_vfl.parties.checkpoints import open_store, tagged_step
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.schedule import SPLITS

from .arrays import to_tensor
from .messages import Content, Verb, pack, pack_description, unpack_config
from .replay import Session
from .serving import serve


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
        kept = kept_digest(session, key, context) if reuse else ""
        description = replace(description, ids_digest="", split_digest="", aligned=kept)
    tags = tuple(open_store(context, session.party.name).tags())
    description = replace(description, checkpoints=tags)
    return Content(config=pack_description(description, versions()))


def _agree(session: Session, content: Content, context: Context) -> Content:
    terms = unpack_config(content)
    session.party.configure(terms)
    session.terms = terms
    schedule = session.party.agreed()
    return Content(config={split: schedule.size(split) for split in SPLITS})


def _passive(session: Session) -> PassiveParty:
    if not isinstance(session.party, PassiveParty):
        raise ConfigError(f"party '{session.party.name}' is not a passive party")
    return session.party


def _label(session: Session) -> LabelParty:
    if not isinstance(session.party, LabelParty):
        raise ConfigError(f"party '{session.party.name}' is not the label party")
    return session.party


def _backward(session: Session, content: Content, context: Context) -> Content:
    if "gradient-step" not in content.config:
        return Content()
    party, step = _passive(session), content.number("gradient-step")
    if "probe" not in content.config:
        party.backward(step, content.gradient())
        return Content()
    settings, task = Leakage.from_text(content.text("probe")), content.text("task")
    labels = None if content.labels is None else to_tensor(content.labels)
    layers = party.backward(step, content.gradient(), probed=settings.layers)
    metrics: dict[str, float] = {}
    if layers and labels is not None:
        alone = replace(settings, coalitions=(), baseline=False)
        watch = LeakageMonitor(alone, cast(Task, task))
        metrics = watch.measure_layers(layers, labels, step)
    if settings.membership and step % settings.every == 0:
        known = labels if settings.membership == "joint" else None
        metrics |= party.membership(known, cast(Task, task))
    return Content(metrics=metrics)


def _layers(content: Content) -> bool:
    return Leakage.from_text(content.text("probe")).layers


def _forward(session: Session, content: Content, context: Context) -> Content:
    reply = _backward(session, content, context)
    party = _passive(session)
    at = content.number("step"), content.number("epoch"), content.number("index")
    probed = "probe" in content.config and _layers(content)
    embedding = party.forward(*at, probed=True) if probed else party.forward(*at)
    return replace(reply, arrays=pack({party.name: embedding}))


def _embed(session: Session, content: Content, context: Context) -> Content:
    reply = _backward(session, content, context)
    party = _passive(session)
    embedding = party.embed(content.text("split"), content.number("index"))
    return replace(reply, arrays=pack({party.name: embedding}))


def _train(session: Session, content: Content, context: Context) -> Content:
    party = _label(session)
    step = content.number("step")
    wants_labels = bool(content.config.get("labels", False))
    if wants_labels and not party.trust_server:
        raise untrusted(party.name, "labels", step)
    party.defender.late = bool(content.config.get("late", False))
    result = party.train_step(
        step, content.number("epoch"), content.number("index"), content.tensors()
    )
    labels = pack({"labels": result.labels})["labels"] if wants_labels else None
    metrics = {**result.metrics, "loss": result.loss, "rows": float(result.rows)}
    return Content(arrays=pack(result.gradients), metrics=metrics, labels=labels)


def _evaluate(session: Session, content: Content, context: Context) -> Content:
    metrics = _label(session).evaluate(
        content.text("split"), content.number("index"), content.tensors()
    )
    return Content(metrics=metrics)


def _predict(session: Session, content: Content, context: Context) -> Content:
    predictions = _label(session).predict(
        content.text("split"), content.number("index"), content.tensors()
    )
    return Content(arrays=pack({"predictions": predictions}))


def _plan(session: Session) -> dict[str, int | str]:
    """Return what decides which rows a step trains on."""
    schedule = session.party.agreed()
    plan, rows = schedule.plan, schedule.size("train")
    found: dict[str, int | str] = {
        "seed": plan.seed,
        "batch_size": plan.batch_size,
        "training rows": rows,
    }
    return {**found, "alignment": session.aligned[:16]} if session.aligned else found


def _checkpoint(session: Session, content: Content, context: Context) -> Content:
    reply = _backward(session, content, context)
    party, tag = session.party, content.text("tag")
    state = {**party.state_dict(), "plan": _plan(session)}
    open_store(context, party.name).save(tag, state)
    return replace(reply, config={"step": party.step})


def _restore(session: Session, content: Content, context: Context) -> Content:
    party, tag = session.party, content.text("tag")
    state = open_store(context, party.name).load(tag)
    if tagged_step(tag) is not None and state["plan"] != _plan(session):
        raise PartyError(
            party.name,
            f"its checkpoint '{tag}' was made with {state['plan']}, this run has "
            f"{_plan(session)}",
            "Resume with the settings of the first run, or start without resume",
        )
    party.load_state_dict({**state, "waiting": []})  # no gradient will come for it
    return Content(config={"step": party.step})


VERBS: dict[Verb, Callable[[Session, Content, Context], Content]] = {
    Verb.HELLO: _hello,
    Verb.ALIGN: align,
    Verb.CONFIGURE: _agree,
    Verb.FORWARD: _forward,
    Verb.TRAIN_STEP: _train,
    Verb.BACKWARD: _backward,
    Verb.EMBED: _embed,
    Verb.EVALUATE: _evaluate,
    Verb.PREDICT: _predict,
    Verb.SERVE: serve,
    Verb.CHECKPOINT: _checkpoint,
    Verb.RESTORE: _restore,
}
