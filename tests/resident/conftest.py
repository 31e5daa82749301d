"""A plain Flower grid without Flower: it calls the ClientApp in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from uuid import uuid4

import numpy as np
import pytest
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
from flwr.supercore.task_identity import TaskIdentity

from flower_vfl.resident import Limits, ResidentGrid, resident

RUN_ID = 17_000_000_000_000_000_001  # Flower's ids use all 64 bits


class PlainGrid(Grid):
    """Each message runs in a thread of its own, on a copy, as between processes."""

    def __init__(self, app: ClientApp, nodes: int, deaf: Iterable[int] = ()) -> None:
        self.app = app
        self.contexts = {
            1000 + i: Context(RUN_ID, 1000 + i, {"partition-id": i}, RecordDict(), {})
            for i in range(nodes)
        }
        self.deaf = set(deaf)
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
            if message.metadata.dst_node_id not in self.deaf:
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


def counting_app() -> ClientApp:
    """Return an ordinary horizontal app: weights plus one, rounds counted in state."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        count = context.state.config_records.get("count", ConfigRecord({"n": 0}))
        context.state["count"] = ConfigRecord({"n": int(str(count["n"])) + 1})
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


def raw(values: np.ndarray) -> Array:
    little = np.ascontiguousarray(values, dtype="<f4")
    return Array("float32", little.shape, "flower_vfl.raw", little.tobytes())


GridMaker = Callable[..., ResidentGrid]


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskIdentity, "_run_id", RUN_ID)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


@pytest.fixture(params=[True, False], ids=["detached", "blocking"])
def detached(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make_grid() -> Iterator[GridMaker]:
    """Return a maker of grids over a counting app; they are closed afterwards."""
    made: list[ResidentGrid] = []

    def make(
        nodes: int = 2,
        *,
        app: ClientApp | None = None,
        deaf: Iterable[int] = (),
        detached: bool = True,
        limits: Limits | None = None,
        **options: object,
    ) -> ResidentGrid:
        plain = PlainGrid(app or resident(counting_app()), nodes, deaf)
        options.setdefault("open_timeout", 10.0)
        grid = ResidentGrid(
            plain,
            detached=detached,
            limits=limits or Limits(silence=3.0, authenticate=2.0),
            **options,  # type: ignore[arg-type]
        )
        made.append(grid)
        return grid

    yield make
    for grid in made:
        grid.close()
