"""A gradient transform for a Flower app whose server holds the labels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from logging import WARNING
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.grids.wrapped import WrappedGrid

from .adapter import Adapter, Labels, Metrics


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
) -> DefendedGrid:
    """Return a grid that transforms the gradients of the messages it sends.

    Everything else goes through it unchanged. A message of the type that lacks the
    arrays, or whose gradient cannot be transformed, raises and nothing is sent.

    Parameters
    ----------
    grid : Grid
        Any Flower grid. The defended one goes around all others.
    transform : object
        A gradient transform, or what names one, such as ``"marvell:s=4"``.
    message_type : str | Sequence[str]
        Type of the messages that hold gradients, e.g. ``"train.apply_gradients"``.
    record : str | None (default: None)
        Name of the array record that holds them; None for every array record.
    arrays : str | Sequence[str] | None (default: None)
        Their names in it; None for every array.
    labels : Labels | Callable[[Message], Labels] | None (default: None)
        Labels of the rows of a gradient, for a transform that requires them: an array,
        or a function of the message.
    party : str | Callable[[Message], str] | None (default: None)
        Name of the receiver; None for its node id.
    epoch : int | Callable[[Message], int] (default: 1)
        The epoch, for a transform that changes with it.
    seed : int | None (default: None)
        Seed of the noise. Who knows it can take the noise off again, so None draws a
        secret one; give one to repeat an experiment.
    """
    to = party or (lambda message: str(message.metadata.dst_node_id))
    return DefendedGrid(
        grid,
        Adapter(transform, message_type, record, arrays, labels, to, epoch, seed),
    )


class DefendedGrid(WrappedGrid):
    """A grid around another; made by :func:`defended_grid`."""

    def __init__(self, grid: Grid, adapter: Adapter) -> None:
        super().__init__(grid)
        self._adapter = adapter
        self.reports: Metrics = {}
        self._others: set[str] = set()
        weakref.finalize(self, _tell_if_unused, adapter, self._others)

    def _defend(self, message: Message) -> Message:
        adapter = self._adapter
        if adapter.wants(message):
            with adapter.lock:
                defended, metrics = adapter.defend(message, message)
            self.reports.update(metrics)
            return defended
        kind = message.metadata.message_type
        if kind not in self._others:
            self._others.add(kind)
            if adapter.record and adapter.record in message.content.array_records:
                text = "Messages of type '%s' have a record '%s' too: sent undefended"
                log(WARNING, text, kind, adapter.record)
        return message

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, gradients transformed, and return their ids."""
        # All are transformed before the first one leaves.
        return self._grid.push_messages([self._defend(m) for m in messages])

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages, gradients transformed, and return the replies."""
        defended = [self._defend(message) for message in messages]
        return self._grid.send_and_receive(defended, timeout=timeout)

    def __getattr__(self, name: str) -> Any:
        """Return what only the wrapped grid has, such as ``close``."""
        if name == "_grid":  # not made yet, as in a copy
            raise AttributeError(name)
        return getattr(self._grid, name)

    def __enter__(self) -> DefendedGrid:
        """Return this grid."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Close the wrapped grid, if it can be closed."""
        getattr(self._grid, "close", lambda: None)()


def _tell_if_unused(adapter: Adapter, others: set[str]) -> None:
    """Say at the end that nothing was defended, though messages were sent."""
    if others and not adapter.steps:
        log(
            WARNING,
            "Nothing was defended: no message was of the type %s; there were %s",
            ", ".join(sorted(adapter.types or ())),
            ", ".join(sorted(others)),
        )
