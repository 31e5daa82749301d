"""Wraps any ClientApp so that it can join a `ResidentGrid`."""

import asyncio
import threading
from typing import Final

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from .event_loop import event_loop
from .executor import Executor
from .session import NodeSession
from .settings import OPEN_RECORD, OPEN_TYPE, SessionOffer

_lock: Final = threading.Lock()
_shared: Final[list[Executor]] = []  # of all detached sessions in this process


def _shared_executor() -> Executor:
    """Return the executor of this process, in a thread that starts on first use."""
    with _lock:
        if not _shared:
            _shared.append(Executor())
            name = "resident-executor"
            threading.Thread(target=_shared[0].run, name=name, daemon=True).start()
        return _shared[0]


class _ResidentApp(ClientApp):
    """Opens sessions and passes every other message to the wrapped app."""

    def __init__(self, app: ClientApp) -> None:
        super().__init__()
        self._app = app
        # Functions that are registered with this app go to the wrapped one.
        registrars = ("train", "evaluate", "query", "lifespan")
        vars(self).update({name: getattr(app, name) for name in registrars})

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != OPEN_TYPE:
            return self._app(message, context)
        offer = SessionOffer.from_record(message.content.config_records[OPEN_RECORD])
        if offer.detached:  # in the background
            session = NodeSession(self._app, context, offer, _shared_executor())
            asyncio.run_coroutine_threadsafe(session.run(), event_loop())
            report = ConfigRecord({"state": "detached"})
        else:
            report = _serve_blocking(self._app, context, offer)
        return Message(RecordDict({OPEN_RECORD: report}), reply_to=message)


def resident(client_app: ClientApp) -> ClientApp:
    """Return a ClientApp that can stay in memory for the length of a run.

    The wrapped app gets the same messages in the same order, one at a time, with the
    `Context` of its node, which the session keeps in memory.

    Parameters
    ----------
    client_app : ClientApp
        Any ClientApp.

    Returns
    -------
    ClientApp
        The app that opens sessions. Functions may be registered with either app.

    Examples
    --------
    >>> from flwr.app import Message
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid, ResidentGrid
    >>> app = resident(ClientApp())
    >>> @app.query()
    ... def echo(message, context):
    ...     return Message(message.content, reply_to=message)
    >>> with ResidentGrid(InProcessGrid(app, nodes=2)) as grid:
    ...     grid.open()
    [1, 2]
    """
    return _ResidentApp(client_app)


def _serve_blocking(
    app: ClientApp, context: Context, offer: SessionOffer
) -> ConfigRecord:
    """Serve a session in this thread, as the process ends with the reply."""
    executor = Executor()
    session = NodeSession(app, context, offer, executor)
    result = asyncio.run_coroutine_threadsafe(session.run(), event_loop())
    result.add_done_callback(lambda _: executor.submit(None))
    executor.run()
    context.state = session.context.state
    return ConfigRecord(
        {"state": "ended", "reason": result.result(), "messages": session.handled}
    )
