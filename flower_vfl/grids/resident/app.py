"""Make any ClientApp able to join a `ResidentGrid`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Final

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from .loop import the_loop
from .session import Executor, Session
from .settings import OPEN_RECORD, OPEN_TYPE, Offer

_Register = Callable[[ClientAppCallable], ClientAppCallable]
_Lifespan = Callable[[Context], Iterator[None]]


class _SharedExecutor:
    """The one pair of hands of a process whose sessions are detached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hands: Executor | None = None

    def get(self) -> Executor:
        """Return them; their thread starts with the first call."""
        with self._lock:
            if self._hands is None:
                self._hands = Executor()
                threading.Thread(
                    target=self._hands.work, name="resident-hands", daemon=True
                ).start()
            return self._hands


_SHARED: Final = _SharedExecutor()


class _ResidentApp(ClientApp):
    """A ClientApp that opens sessions and leaves every other message to `app`."""

    def __init__(self, app: ClientApp) -> None:
        super().__init__()
        self._app = app

    def __call__(self, message: Message, context: Context) -> Message:
        """Execute the ClientApp."""
        if message.metadata.message_type != OPEN_TYPE:
            return self._app(message, context)
        offer = Offer.from_record(message.content.config_records[OPEN_RECORD])
        serve = _serve_detached if offer.detached else _serve_here
        report = serve(self._app, context, offer)
        return Message(RecordDict({OPEN_RECORD: report}), reply_to=message)

    def train(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> _Register:
        """Register a train function with the wrapped app."""
        return self._app.train(action, mods=mods)

    def evaluate(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> _Register:
        """Register an evaluate function with the wrapped app."""
        return self._app.evaluate(action, mods=mods)

    def query(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> _Register:
        """Register a query function with the wrapped app."""
        return self._app.query(action, mods=mods)

    def lifespan(self) -> Callable[[_Lifespan], _Lifespan]:
        """Register a lifespan function with the wrapped app."""
        return self._app.lifespan()


def resident(client_app: ClientApp) -> ClientApp:
    """Return a ClientApp that can stay in memory for the length of a run.

    The app itself is used as it is: it gets the same messages, in the same order, one
    at a time, with the node's `Context`, which the session keeps in memory. An app
    that wants to know whether it is kept asks `flower_vfl.protocol.residence.is_resident`.

    Parameters
    ----------
    client_app : ClientApp
        Any ClientApp.

    Examples
    --------
    ::

        app = resident(ClientApp())

        @app.train()
        def train(message: Message, context: Context) -> Message: ...
    """
    return _ResidentApp(client_app)


def _serve_detached(app: ClientApp, context: Context, offer: Offer) -> ConfigRecord:
    """Start the session and return at once."""
    session = Session(app, context, offer, _SHARED.get())
    asyncio.run_coroutine_threadsafe(session.run(), the_loop())
    return ConfigRecord({"state": "detached"})


def _serve_here(app: ClientApp, context: Context, offer: Offer) -> ConfigRecord:
    """Stay in the session until it is over: the process ends with the reply.

    The messages are handled in this thread, which in a client process is the main
    one; the stream is read on the event loop.
    """
    hands = Executor()
    session = Session(app, context, offer, hands)
    talk = asyncio.run_coroutine_threadsafe(session.run(), the_loop())
    talk.add_done_callback(lambda _: hands.stop())
    hands.work()
    return ConfigRecord(
        {"state": "ended", "reason": talk.result(), "messages": session.handled}
    )
