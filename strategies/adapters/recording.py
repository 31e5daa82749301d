"""Recordings of Flower apps that others wrote, for ``flower-vfl audit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid

from flower_vfl.leakage.recording import Recorder

from .defended_grid import DefendedGrid
from .defense_mod import defense_mod
from .message_defender import Labels, MessageDefender


def record_grid(
    grid: Grid,
    recorder: Recorder | str | Path,
    *,
    message_type: str | Sequence[str],
    labels: Labels | Callable[[Message], Labels],
    record: str | None = None,
    arrays: str | Sequence[str] | None = None,
    rows: Labels | Callable[[Message], Labels] | None = None,
    embeddings: str | None = None,
    party: str | Callable[[Message], str] | None = None,
) -> DefendedGrid:
    """Return a grid that records the gradients of the messages it sends.

    All messages pass unchanged. The recording is complete when the grid is closed or no
    longer used, or the process ends.

    Parameters
    ----------
    grid : Grid
        Any Flower grid. To record what a defense lets through, record inside:
        ``defended_grid(record_grid(grid, ...), ...)``.
    recorder : Recorder | str | Path
        A recorder, or the folder of the recording.
    message_type, record, arrays, party
        As for :func:`flower_vfl.defended_grid`: where gradients are, and whose.
    labels : Labels | Callable[[Message], Labels]
        Labels of the rows of a gradient: an array, or a function of the message.
    rows : Labels | Callable[[Message], Labels] | None (default: None)
        Numbers of these rows, the same in every epoch. Without them, an audit can
        follow rows through the epochs only if every batch has all rows.
    embeddings : str | None (default: None)
        As for :func:`flower_vfl.defended_grid`; recorded with the gradient.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, record_grid
    >>> grid, labels = InProcessGrid(ClientApp(), nodes=1), [1, 0]
    >>> with record_grid(grid, "recorded", message_type="train", labels=labels) as grid:
    ...     grid.get_node_ids()  # and send gradients of two rows
    [1]
    """
    if not isinstance(recorder, Recorder):
        recorder = Recorder(recorder)
    receiver = party or (lambda message: str(message.metadata.dst_node_id))
    more = labels, receiver, 1, 0, rows, embeddings
    defender = MessageDefender(recorder, message_type, record, arrays, *more)
    return DefendedGrid(grid, defender, recorder.save)


def record_mod(
    folder: str | Path,
    *,
    labels: Labels | Callable[[Message, Context], Labels],
    message_type: str | Sequence[str] | None = None,
    record: str | None = None,
    arrays: str | Sequence[str] | None = None,
    rows: Labels | Callable[[Message, Context], Labels] | None = None,
    embeddings: str | None = None,
    party: str | Callable[[Message, Context], str] | None = None,
) -> Mod:
    """Return a mod for a ``ClientApp`` that records the gradients of a reply.

    The reply passes unchanged. Every gradient is a file of its own, because Flower may
    start a process for every message. To record what a defense lets through, place it
    before the mod of the defense.

    Parameters
    ----------
    folder : str | Path
        Folder of the recording, at the client.
    labels, message_type, record, arrays, rows, embeddings, party
        As for :func:`flower_vfl.defense_mod`; labels are required.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import record_mod
    >>> mod = record_mod("recorded", message_type="train", labels=[1, 0])
    >>> client = ClientApp(mods=[mod])
    """
    return defense_mod(
        Recorder(folder, every=1),
        message_type=message_type,
        record=record,
        arrays=arrays,
        labels=labels,
        party=party,
        rows=rows,
        embeddings=embeddings,
    )
