"""How a node keeps its party's state under a tag, and goes back to it."""

from flwr.app import Context

from flower_vfl.errors import PartyError
from flower_vfl.parties.checkpoints import open_store, tagged_step

from .messages import Content
from .replay import Session


def keep(session: Session, tag: str, context: Context) -> None:
    """Save a party's state after the last completed step."""
    state = {**session.party.state_dict(), "plan": _plan(session)}
    open_store(context, session.party.name).save(tag, state)


def restore(session: Session, content: Content, context: Context) -> Content:
    """Go back to a saved state; return its step."""
    party, tag = session.party, content.text("tag")
    session.restores += 1
    session.policy.check_restores(party.name, session.restores)
    state = open_store(context, party.name).load(tag)
    if tagged_step(tag) is not None and state["plan"] != _plan(session):
        raise PartyError(
            party.name,
            f"its checkpoint '{tag}' was made with {state['plan']}, this run has "
            f"{_plan(session)}",
            "Resume with the settings of the first run, or start without resume",
        )
    party.load_state_dict({**state, "waiting": []})  # no gradient will come for it
    if session.seals is not None:
        session.seals.restored()
    return Content(step=party.step)


def _plan(session: Session) -> dict[str, int | str]:
    """Return what decides which rows a step trains on."""
    schedule = session.party.configured()
    plan, rows = schedule.plan, schedule.size("train")
    found: dict[str, int | str] = {
        "seed": plan.seed,
        "batch_size": plan.batch_size,
        "training rows": rows,
    }
    return {**found, "alignment": session.aligned[:16]} if session.aligned else found
