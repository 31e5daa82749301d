"""Recordings of Flower apps that others wrote, for ``flower-vfl audit``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

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
) -> RecordingGrid:
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
        Name of the array record in the replies of a party that holds its embeddings:
        the array with the gradient's name, or the only one. The last one before the
        gradient is recorded with it.

    Returns
    -------
    RecordingGrid
        A Flower grid.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, record_grid
    >>> from flower_vfl.leakage.recording import read_recording
    >>> client, folder = ClientApp(), tempfile.TemporaryDirectory()
    >>> @client.train()
    ... def train(message, context):
    ...     return Message(RecordDict(), reply_to=message)
    >>> gradients = ArrayRecord([np.array([[3.0, 4.0], [0.3, 0.4]])])
    >>> with record_grid(
    ...     InProcessGrid(client, 1), folder.name, message_type="train", labels=[1, 0]
    ... ) as grid:
    ...     message = Message(RecordDict({"gradients": gradients}), 1, "train")
    ...     _ = grid.send_and_receive([message])
    >>> read_recording(folder.name).labels
    array([1, 0])
    """
    if not isinstance(recorder, Recorder):
        recorder = Recorder(recorder)
    receiver = party or (lambda message: str(message.metadata.dst_node_id))
    more = labels, receiver, 1, 0, rows, embeddings
    defender = MessageDefender(recorder, message_type, record, arrays, *more)
    return RecordingGrid(grid, defender)


class RecordingGrid(DefendedGrid):
    """The grid that :func:`record_grid` returns."""

    def __init__(self, grid: Grid, defender: MessageDefender) -> None:
        super().__init__(grid, defender)
        # A ServerApp does not close its grid.
        self._save = weakref.finalize(self, cast(Recorder, defender.transform).save)

    def close(self) -> None:
        """Write what is not written yet, and close the wrapped grid."""
        self._save()
        super().close()


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
    """Return a client mod that records the gradients of a reply.

    The reply passes unchanged. Every gradient is a file of its own, because Flower may
    start a process for every message.

    Parameters
    ----------
    folder : str | Path
        Folder of the recording, at the client.
    labels, record, arrays, rows
        As for :func:`record_grid`; a function gets the answered message and the context
        of the node.
    message_type, party
        As for :func:`flower_vfl.defense_mod`.
    embeddings : str | None (default: None)
        As for :func:`record_grid`; the record is one of the answered message.

    Returns
    -------
    Mod
        A mod for ``ClientApp(mods=[...])`` or for one function of an app. To record
        what a defense lets through, place it before the mod of the defense.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from flwr.app import Array, ArrayRecord, Message, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, record_mod
    >>> from flower_vfl.leakage.recording import read_recording
    >>> client, folder = ClientApp(), tempfile.TemporaryDirectory()
    >>> gradient = Array(np.array([[3.0, 4.0], [0.3, 0.4]]))
    >>> gradients = ArrayRecord({"bank": gradient})
    >>> @client.train(mods=[record_mod(folder.name, labels=[1, 0])])
    ... def train(message, context):
    ...     return Message(RecordDict({"gradients": gradients}), reply_to=message)
    >>> with InProcessGrid(client, nodes=1) as grid:
    ...     (reply,) = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    >>> list(read_recording(folder.name).parties)
    ['bank']
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
