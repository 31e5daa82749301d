"""How a node keeps its party's state under a tag, and goes back to it."""

from flwr.app import Context

from flower_vfl.alignment.messages import read_list
from flower_vfl.errors import PartyError
from flower_vfl.parties.base import Party
from flower_vfl.parties.checkpoints import FINAL, DamagedError, open_store, writing
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.schedule import keyed_digest, plain_list
from flower_vfl.randomness import tensor_digest

from .messages import Content
from .replay import Session

_REMEDY = "Resume with what the first run had, or start without resume"
_DATA = "its data"


def keep(session: Session, content: Content, context: Context) -> str:
    """Save a party's state, drop those that are not kept, and return a digest."""
    party, tag = session.party, content.text("tag")
    state = {**party.state_dict(), "plan": _plan(session)}
    store = open_store(context, party.name)
    with writing(party.name, tag):
        store.prune({tag, *read_list(content, "keep", str)})
        return store.save(tag, state, content.text("run"))


def restore(session: Session, content: Content, context: Context) -> Content:
    """Go back to the first of some saved states, if none of them is damaged."""
    party, store = session.party, open_store(context, session.party.name)
    tags, digests = (read_list(content, key, str) for key in ("tags", "digests"))
    run = content.text("run")
    try:
        given = zip(tags, digests, strict=True)
        states = [store.load(tag, run, digest) for tag, digest in given]
    except DamagedError as error:
        return Content({"damaged": str(error)})
    if party.step or not session.renewed:  # else that it was configured was counted
        session.go_back()
    session.renewed = False
    state, now = states[0], _plan(session)
    for name, was in state["plan"].items():
        if was != now.get(name) and tags[0] != FINAL:  # which may predict other rows
            values = f"was {was} in the run that is resumed, now {now.get(name)}"
            if name == _DATA:
                values = "is not that of the run that is resumed"
            raise PartyError(party.name, f"{name} {values}", _REMEDY)
    pipelined = session.config is not None and session.config.pipeline
    waiting = state.get("waiting", []) if pipelined else []  # no gradient will come
    try:
        party.load_state_dict({**state, "waiting": waiting})
    except (KeyError, RuntimeError, ValueError) as error:
        weight = str(error).splitlines()[-1].strip("\t .")  # and shapes, by torch
        problem = f"its models do not fit its checkpoint '{tags[0]}': {weight}"
        raise PartyError(party.name, problem, _REMEDY) from error
    if isinstance(party, LabelParty) and "loss" in content.config:
        party.choose_loss(content.text("loss"))
    if session.seals is not None:
        session.seals.restored()
    return Content(step=party.step)


def _plan(session: Session) -> dict[str, int | float | str]:
    """Return what decides which rows a step trains on, and how."""
    party, config = session.party, session.config
    schedule = party.configured()
    optimizers = [f"{type(o).__name__} {o.defaults}" for o in party.optimizers()]
    session.data = session.data or _data_digest(party)
    return {
        "seed": schedule.plan.seed,
        "batch_size": schedule.plan.batch_size,
        "the number of its training rows": schedule.size("train"),
        "its learning rate": config.learning_rate if config else 0.0,
        "its optimizer": ", ".join(optimizers),
        "its alignment": session.aligned[:16],
        _DATA: session.data,
    }


def _data_digest(party: Party) -> str:
    """Return a digest of a party's rows, which never leaves it."""
    tensors = [*party.features, getattr(party, "raw_labels", None)]
    found = [tensor_digest(t, 0).hex() for t in tensors if t is not None]
    lists = [plain_list(e) for e in (party.ids, party.split) if e is not None]
    return keyed_digest([*found, *(value for each in lists for value in each)], b"")
