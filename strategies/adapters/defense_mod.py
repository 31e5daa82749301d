"""A gradient transform for a Flower app in which a client holds the labels."""

from collections.abc import Callable, Sequence
from typing import cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable, Mod

from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import from_bytes, to_bytes

from .message_defender import Labels, MessageDefender


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
    rows: Labels | Callable[[Message, Context], Labels] | None = None,
    embeddings: str | None = None,
) -> Mod:
    """Return a mod for a ``ClientApp`` that transforms the gradients of a reply.

    The mod keeps its state in ``context.state``, because Flower may start a process for
    every message. It raises an error if a reply lacks the arrays, or its gradient
    cannot be transformed.

    Parameters
    ----------
    transform, record, arrays, seed
        As for :func:`defended_grid`.
    message_type : str | Sequence[str] | None (default: None)
        Type of the messages whose replies hold gradients; None for every message of
        the app or function with this mod.
    labels, epoch, rows
        As for :func:`defended_grid`; a function gets the answered message and the
        context of the node.
    party : str | Callable[[Message, Context], str] | None (default: None)
        Name of the party that the gradient is for; None for the name of its array.
    report : str | None (default: None)
        Name of a metric record to add to the reply, with the metrics of the transform
        as ``<party>.<metric>``; None reports nothing to the server.
    embeddings : str | None (default: None)
        As for :func:`defended_grid`; the record is one of the answered message.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, defense_mod
    >>> client = ClientApp()
    >>> gradients = ArrayRecord([np.array([[3.0, 4.0], [0.3, 0.4]])])
    >>> @client.train(mods=[defense_mod("max-norm", record="gradients", seed=1)])
    ... def train(message, context):
    ...     return Message(RecordDict({"gradients": gradients}), reply_to=message)
    >>> with InProcessGrid(client, nodes=1) as grid:
    ...     (reply,) = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    >>> received = reply.content["gradients"]["0"].numpy()
    >>> bool(np.allclose(received, gradients["0"].numpy()))
    False
    """
    more = labels, party, epoch, seed, rows, embeddings
    defender = MessageDefender(transform, message_type, record, arrays, *more)
    name = type(defender.transform).__name__
    types = "+".join(sorted(defender.types or ()))
    state = "/".join(["flower_vfl.defense", name, types, record or ""])

    def mod(message: Message, context: Context, app: ClientAppCallable) -> Message:
        reply = app(message, context)
        if reply.has_error() or not defender.matches(message):
            return reply
        with defender.lock:
            # The nodes of a simulation share a process and this mod.
            saved = context.state.config_records.get(state)
            known = from_bytes(cast(bytes, saved["state"])) if saved else None
            defender.load_state_dict(known)
            sent = message.content.array_records.get(embeddings or "")
            defended, metrics = defender.defend(reply, sent, message, context)
            kept = ConfigRecord({"state": to_bytes(defender.state_dict())})
        context.state[state] = kept
        if report is not None:
            if report in defended.content:
                raise ConfigError(f"the reply has a record '{report}'; use another")
            defended.content[report] = MetricRecord(
                {f"{p}.{m}": value for p in metrics for m, value in metrics[p].items()}
            )
        return defended

    return mod
