"""A gradient transform for a Flower app in which a client holds the labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable, Mod

from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import from_bytes, to_bytes

from .adapter import Adapter, Labels


def defense_mod(
    transform: object,
    *,
    message_type: str | Sequence[str] | None = None,
    record: str | None = None,
    arrays: str | Sequence[str] | None = None,
    labels: Labels | Callable[[Message, Context], Labels] | None = None,
    party: str | Callable[[Message, Context], str] | None = None,
    epoch: int | Callable[[Message, Context], int] = 1,
    seed: int | None = None,
    report: str | None = None,
) -> Mod:
    """Return a client mod that transforms the gradients of a reply.

    The step number, the seed and the transform's state are kept in ``context.state``,
    because Flower may start a process for every message. A reply that lacks the arrays,
    or whose gradient cannot be transformed, becomes an error reply.

    Parameters
    ----------
    transform : object
        A gradient transform, or what names one, such as ``"marvell:s=4"``.
    message_type : str | Sequence[str] | None (default: None)
        Type of the messages whose replies hold gradients; None for every message of
        the app or function that has this mod.
    record : str | None (default: None)
        Name of the array record that holds them; None for every array record.
    arrays : str | Sequence[str] | None (default: None)
        Their names in it; None for every array.
    labels : Labels | Callable[[Message, Context], Labels] | None (default: None)
        Labels of the rows of a gradient, for a transform that requires them: an array,
        or a function of the message that is answered and the node's context.
    party : str | Callable[[Message, Context], str] | None (default: None)
        Name of the party that the gradient is for; None for the name of its array.
    epoch : int | Callable[[Message, Context], int] (default: 1)
        The epoch, for a transform that changes with it.
    seed : int | None (default: None)
        Seed of the noise. Who knows it can take the noise off again, so None draws a
        secret one; give one to repeat an experiment.
    report : str | None (default: None)
        Name of a metric record to add to the reply, with what the transform reported
        as ``<party>.<metric>``; None tells the server nothing.
    """
    adapter = Adapter(
        transform, message_type, record, arrays, labels, party, epoch, seed
    )
    name = type(adapter.transform).__name__
    types = "+".join(sorted(adapter.types or ()))
    state = "/".join(["flower_vfl.defense", name, types, record or ""])

    def mod(message: Message, context: Context, app: ClientAppCallable) -> Message:
        reply = app(message, context)
        if reply.has_error() or not adapter.wants(message):
            return reply
        with adapter.lock:
            # The nodes of a simulation share a process, not a state.
            saved = context.state.config_records.get(state)
            adapter.load_state_dict(
                from_bytes(cast(bytes, saved["state"])) if saved else None
            )
            defended, metrics = adapter.defend(reply, message, context)
            kept = ConfigRecord({"state": to_bytes(adapter.state_dict())})
        context.state[state] = kept
        if report is not None:
            if report in defended.content:
                raise ConfigError(f"the reply has a record '{report}'; name another")
            defended.content[report] = MetricRecord(
                {f"{p}.{m}": value for p in metrics for m, value in metrics[p].items()}
            )
        return defended

    return mod
