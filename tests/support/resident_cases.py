"""A grid, an app, records and a TCP proxy for the tests of resident sessions."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from uuid import uuid4

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flower_vfl.grids.resident import ResidentGrid
from flower_vfl.protocol import replay

RUN_ID = 17_000_000_000_000_000_001  # Flower's ids use all 64 bits


class PlainGrid(Grid):
    """Calls the app on a copy of each message, in a thread of its own."""

    def __init__(
        self, app: ClientApp, nodes: int, unresponsive: Iterable[int] = ()
    ) -> None:
        replay.forget(RUN_ID)  # what a test before this one has left
        self.app = app
        self.contexts = {
            1000 + i: Context(RUN_ID, 1000 + i, {"partition-id": i}, RecordDict(), {})
            for i in range(nodes)
        }
        self.unresponsive = set(unresponsive)
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}
        self._run = Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            self.sent.append(message)
            if message.metadata.dst_node_id not in self.unresponsive:
                args = (deepcopy(message),)
                threading.Thread(target=self._call, args=args, daemon=True).start()
        return ids

    def _call(self, message: Message) -> None:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            reply = self.app(message, context)
        except Exception as ex:
            reason = f"{type(ex)}:<'{ex}'>"
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
            reply = Message(error, reply_to=message)
        self.replies[message.metadata.message_id] = reply

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(i) for i in set(message_ids) if i in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        ids = set(self.push_messages(messages))
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        replies: list[Message] = []
        while ids and time.monotonic() < end:
            replies += self.pull_messages(ids)
            ids -= {reply.metadata.reply_to_message_id for reply in replies}
            time.sleep(0.005)
        return replies


# NumPy reads headers with ``ast``. In Python 3.11 two threads may disturb each other
# there: "AST constructor recursion depth mismatch".
_reading = threading.Lock()


def counting_app() -> ClientApp:
    """Return an ordinary horizontal app: weights plus one, rounds counted in state."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        count = context.state.config_records.get("count", ConfigRecord({"n": 0}))
        context.state["count"] = ConfigRecord({"n": int(str(count["n"])) + 1})
        with _reading:
            weights = message.content.array_records["weights"].to_numpy_ndarrays()
        content = RecordDict(
            {
                "weights": ArrayRecord([w + 1 for w in weights]),
                "metrics": MetricRecord({"num-examples": 3, "loss": 0.5}),
                "count": context.state.config_records["count"],
            }
        )
        return Message(content, reply_to=message)

    @app.query("echo")
    def echo(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    @app.query("slow")
    def slow(message: Message, context: Context) -> Message:
        seconds = message.content.config_records["config"]["seconds"]
        assert isinstance(seconds, float)
        time.sleep(seconds)
        return Message(message.content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        raise ZeroDivisionError("no data")

    return app


def weights(value: float = 0.0) -> RecordDict:
    array = np.full((4, 3), value, dtype=np.float32)
    return RecordDict({"weights": ArrayRecord([array])})


GridMaker = Callable[..., ResidentGrid]


def to_all(grid: Grid, content: RecordDict, kind: str) -> list[Message]:
    return [Message(content, node, kind) for node in grid.get_node_ids()]


def sleep_record(seconds: float) -> RecordDict:
    return RecordDict({"config": ConfigRecord({"seconds": seconds})})


def all_record_types() -> RecordDict:
    return RecordDict(
        {
            "config": ConfigRecord(
                {
                    "int": -(2**62),
                    "big": 2**64 - 1,
                    "float": 0.1,
                    "bool": True,
                    "text": "Ärger",
                    "bytes": b"\x00\xff",
                    "none": [],
                    "ints": [1, -2],
                    "bools": [True, False],
                    "blobs": [b"", b"x"],
                }
            ),
            "arrays": ArrayRecord(
                {
                    "numpy": Array(np.arange(6, dtype=np.int64).reshape(2, 3)),
                    "floats": Array(np.arange(4.0, dtype=np.float32)),
                    "empty": Array("float32", (0, 7), "someone.else", b""),
                    "scalar": Array(np.array(2.5)),
                    "foreign": Array("float32", (3,), "someone.else", b"whatever"),
                }
            ),
            "metrics": MetricRecord({"loss": 0.25, "n": [1, 2]}),
            "empty": ArrayRecord(),
        }
    )


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Proxy:
    """A TCP relay that can cut all connections and refuse new ones."""

    def __init__(self) -> None:
        self.target = ("127.0.0.1", _free_port())
        self.closed = False
        self.made = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._listener.getsockname())

    @property
    def behind(self) -> str:
        return "{}:{}".format(*self.target)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    if self.closed:
                        raise OSError("closed")
                    far = socket.create_connection(self.target)
                except OSError:
                    near.close()
                    continue
                self.made += 1
                with self._lock:
                    self._pairs += [near, far]
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(a, b), daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for each in pairs:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def stop(self) -> None:
        self._listener.close()
        self.cut()


class RecordingApp:
    """An app that records its executions and whose state depends on their order."""

    def __init__(self) -> None:
        self.executed: list[tuple[int, int]] = []
        self.started = threading.Event()
        self.app = ClientApp()

        @self.app.train()
        def train(message: Message, context: Context) -> Message:
            self.started.set()
            config = message.content.config_records["config"]
            step, seconds = config["step"], config["seconds"]
            assert isinstance(step, int) and isinstance(seconds, float)
            time.sleep(seconds)
            self.executed.append((context.node_id, step))
            old = context.state.config_records.get("sum", ConfigRecord({"x": 0}))["x"]
            assert isinstance(old, int)
            context.state["sum"] = ConfigRecord({"x": (31 * old + step) % 1_000_003})
            content = RecordDict({"sum": context.state.config_records["sum"]})
            return Message(content, reply_to=message)


def step_record(step: int, seconds: float = 0.0) -> RecordDict:
    return RecordDict({"config": ConfigRecord({"step": step, "seconds": seconds})})


def sums(replies: list[Message]) -> dict[int, object]:
    return {
        reply.metadata.src_node_id: reply.content.config_records["sum"]["x"]
        for reply in replies
    }
