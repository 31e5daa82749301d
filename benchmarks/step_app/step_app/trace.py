"""Time stamps of every request, taken from outside the package.

`install` wraps the functions that a request passes. Nothing is wrapped in an ordinary
run. The clock is the same for all processes of a machine. A request is known by its
node and its sequence number.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flower_vfl.grids.resident import pending_requests, session, wire

FOLDER = "STEP_TRACE"  # variable with the folder that the events are written to
END = "end"  # of a session

_events: list[tuple[Any, ...]] = []
_current = threading.local()  # the request that the thread answers


def _wrap(
    owner: Any, name: str, kind: str, key: Callable[..., object], enter: bool = False
) -> None:
    """Note each call of a function; with `enter` the thread then works for its key."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **options: Any) -> Any:
        found = key(*args)
        if enter:
            _current.key = found
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return original(*args, **options)
        finally:
            busy = time.thread_time() - cpu
            times = (start, time.perf_counter(), busy, time.process_time())
            _events.append((kind, found, *times))
            if found == END:
                write()

    setattr(owner, name, noted)


def install() -> None:
    """Note what happens to every request in this process, from now on."""
    if hasattr(wire.encode, "__wrapped__"):
        return

    def current(*_: object) -> object:
        return getattr(_current, "key", None)

    def node(each: Any, frame: memoryview, *_: object) -> object:
        return each.context.node_id, wire.read_frame_head(frame)[0].sequence

    def ended(_: object, frame: memoryview) -> object:
        return None if bytes(frame[:1]) == wire.REQUEST else END

    sessions, requests = session.NodeSession, pending_requests.PendingRequests
    _wrap(sessions, "_on_frame", "frame", ended)
    _wrap(sessions, "accept", "arrival", node)
    _wrap(sessions, "answer", "answer", node, enter=True)
    _wrap(session, "call_app", "app", current)
    _wrap(wire, "encode", "encode", current)
    _wrap(wire, "decode", "decode", current)
    _wrap(requests, "send", "send", lambda *_: None)
    _wrap(requests, "wait", "wait", lambda *_: None)

    def sent(each: Any, _: object, request: Any) -> object:
        kind = request.message.metadata.message_type
        return each.node_id, request.sequence, kind

    def received(_: object, each: Any, sequence: int, __: object) -> object:
        return each.node_id, sequence

    _wrap(pending_requests.ServerSession, "_put", "put", sent)
    _wrap(requests, "receive", "receive", received)


def write() -> None:
    """Append the events of this process to its file."""
    events, _events[:] = list(_events), []
    with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
