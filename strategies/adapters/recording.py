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
    >>> import tempfile
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, record_mod
    >>> from flower_vfl.leakage.recording import read_recording
    >>> client, folder = ClientApp(), tempfile.TemporaryDirectory()
    >>> gradients = ArrayRecord([np.array([[3.0, 4.0], [0.3, 0.4]])])
    >>> @client.train(mods=[record_mod(folder.name, labels=[1, 0])])
    ... def train(message, context):
    ...     return Message(RecordDict({"gradients": gradients}), reply_to=message)
    >>> with InProcessGrid(client, nodes=1) as grid:
    ...     (reply,) = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    >>> list(read_recording(folder.name).parties)
    ['0']
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
