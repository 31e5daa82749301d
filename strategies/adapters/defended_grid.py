"""A gradient transform for a Flower app whose server holds the labels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.grids.wrapped import WrappedGrid

from .message_defender import Labels, MessageDefender, Metrics


def defended_grid(
    grid: Grid,
    transform: object,
    *,
    message_type: str | Sequence[str],
    record: str | None = None,
    arrays: str | Sequence[str] | None = None,
    labels: Labels | Callable[[Message], Labels] | None = None,
    party: str | Callable[[Message], str] | None = None,
    epoch: int | Callable[[Message], int] = 1,
    seed: int | None = None,
    rows: Labels | Callable[[Message], Labels] | None = None,
    embeddings: str | None = None,
) -> DefendedGrid:
    """Return a grid that transforms the gradients of the messages it sends.

    Other messages pass unchanged. If a message of the given type lacks the arrays, or
    its gradient cannot be transformed, the grid raises an error and sends nothing. Its
    ``reports`` holds the last metrics of each party.

    Parameters
    ----------
    grid : Grid
        Any Flower grid. The defended grid must be the outermost one.
    transform : object
        A gradient transform or its config string, such as ``"marvell:s=4"``.
    message_type : str | Sequence[str]
        Type of the messages that hold gradients, e.g. ``"train.apply_gradients"``.
    record, arrays : str | Sequence[str] | None (default: None)
        Name of the array record that holds them, and their names in it; None for all.
    labels : Labels | Callable[[Message], Labels] | None (default: None)
        Labels of the rows of a gradient, for a transform that requires them: an array,
        or a function of the message.
    party : str | Callable[[Message], str] | None (default: None)
        Name of the receiver; None for its node id.
    epoch : int | Callable[[Message], int] (default: 1)
        The epoch, for a transform that changes with it.
    seed : int | None (default: None)
        Seed of the noise, for repeatable experiments: whoever knows it can subtract the
        noise. None draws a secret one.
    rows : Labels | Callable[[Message], Labels] | None (default: None)
        Numbers of the rows, the same in every epoch, for a transform that uses them.
    embeddings : str | None (default: None)
        Name of the array record in replies that holds embeddings, for a transform that
        uses them: the array with the gradient's name, or the only one.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, defended_grid
    >>> client, received = ClientApp(), []
    >>> @client.train()
    ... def train(message, context):
    ...     received.append(message.content["gradients"]["0"].numpy())
    ...     return Message(RecordDict(), reply_to=message)
    >>> gradients = ArrayRecord([np.array([[3.0, 4.0], [0.3, 0.4]])])
    >>> with defended_grid(
    ...     InProcessGrid(client, nodes=1), "max-norm", message_type="train", seed=1
    ... ) as grid:
    ...     message = Message(RecordDict({"gradients": gradients}), 1, "train")
    ...     _ = grid.send_and_receive([message])
    >>> bool(np.allclose(received[0], gradients["0"].numpy()))
    False
    """
    receiver = party or (lambda message: str(message.metadata.dst_node_id))
    more = labels, receiver, epoch, seed, rows, embeddings
    defender = MessageDefender(transform, message_type, record, arrays, *more)
    return DefendedGrid(grid, defender)


class DefendedGrid(WrappedGrid):
    """The grid of :func:`defended_grid` and, with `save`, of :func:`record_grid`."""

    def __init__(
        self,
        grid: Grid,
        defender: MessageDefender,
        save: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(grid)
        self._defender = defender
        self.reports: Metrics = {}
        self._embeddings: dict[int, ArrayRecord] = {}  # the last of each node
        self._other_types: set[str] = set()
        weakref.finalize(self, _warn_if_unused, defender, self._other_types)
        # A ServerApp does not close its grid.
        self._save = weakref.finalize(self, save) if save is not None else None

    def close(self) -> None:
        """Write what is not written yet, and close the wrapped grid."""
        if self._save is not None:
            self._save()
        super().close()

    def _defend(self, message: Message) -> Message:
        defender = self._defender
        if defender.matches(message):
            with defender.lock:
                sent = self._embeddings.get(message.metadata.dst_node_id)
                defended, metrics = defender.defend(message, sent, message)
            self.reports.update(metrics)
            return defended
        kind = message.metadata.message_type
        if kind not in self._other_types:
            self._other_types.add(kind)
            if defender.record and defender.record in message.content.array_records:
                text = "Messages of type '%s' have a record '%s' too: sent undefended"
                log(WARNING, text, kind, defender.record)
        return message

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages with transformed gradients and return their ids."""
        # All gradients are transformed before the first message is sent.
        return self._grid.push_messages([self._defend(m) for m in messages])

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages with transformed gradients and return the replies."""
        defended = [self._defend(message) for message in messages]
        return self._received(self._grid.send_and_receive(defended, timeout=timeout))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        return self._received(self._grid.pull_messages(message_ids))

    def _received(self, replies: Iterable[Message]) -> Iterable[Message]:
        """Return the replies, of which the embeddings are kept if they have a name."""
        name = self._defender.embeddings
        if name is None:
            return replies
        replies = list(replies)
        for reply in replies:
            if reply.has_content() and name in reply.content.array_records:
                record = reply.content.array_records[name]
                self._embeddings[reply.metadata.src_node_id] = record
        return replies

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped grid, such as ``parties``."""
        if name == "_grid":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self._grid, name)


def _warn_if_unused(defender: MessageDefender, other_types: set[str]) -> None:
    """Warn at the end if messages were sent and none was defended."""
    if other_types and not defender.steps:
        text = "Nothing was defended: no message was of the type %s; there were %s"
        wanted, seen = sorted(defender.types or ()), sorted(other_types)
        log(WARNING, text, ", ".join(wanted), ", ".join(seen))
