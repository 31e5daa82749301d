"""Small vertical runs, and grids that record, disturb or forget, for several tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from flower_vfl import (
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    PassiveParty,
    in_process,
    vertical_client_app,
)
from flower_vfl.grids import wrapped
from flower_vfl.objectives import OptimizerFactory
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.protocol import replay as sessions
from flower_vfl.strategies import VerticalStrategy

ROWS, COLUMNS, WIDTH = 60, 4, 3
ADAM: OptimizerFactory = partial(torch.optim.Adam, lr=0.01)
SGD: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)


def features(number: int, rows: int = ROWS) -> Tensor:
    """Return the features of party ``number``; 0 is the label party."""
    stream = torch.Generator().manual_seed(100 + number)
    return torch.randn(rows, COLUMNS, generator=stream)


def labels(rows: int = ROWS) -> Tensor:
    """Return binary labels that the features say something about."""
    return (features(0, rows)[:, 0] + features(1, rows)[:, 0] > 0).long()


def bottom() -> nn.Module:
    """Return a bottom model with everything that has a state of its own."""
    return nn.Sequential(
        nn.Linear(COLUMNS, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, WIDTH),
    )


def top(parties: int) -> nn.Module:
    """Return a top model over the concatenated embeddings of some parties."""
    return nn.Sequential(
        nn.Linear(WIDTH * parties, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1)
    )


def make_label(context: Context, **options: Any) -> LabelParty:
    """Return the label party of :func:`rich_app`, with features of its own."""
    return LabelParty(
        labels(),
        CrossEntropy(top(int(context.node_config["num-partitions"]))),
        features=features(0),
        model=bottom(),
        optimizer=ADAM,
        device="cpu",
        **{"trust_server": True, **options},
    )


def make_passive(context: Context) -> PassiveParty:
    """Return a passive party of :func:`rich_app`."""
    data = features(int(context.node_config["partition-id"]))
    return PassiveParty(data, bottom(), optimizer=ADAM, device="cpu")


def rich_app(**options: Any) -> ClientApp:
    """Return an app whose parties have dropout, batch norm and Adam."""
    return vertical_client_app(make_passive, lambda c: make_label(c, **options))


def simple_parties(
    passive: int = 2, rows: int = ROWS, **options: Any
) -> tuple[LabelParty, list[PassiveParty]]:
    """Return linear parties made by hand; options are the label party's."""
    torch.manual_seed(0)
    objective = CrossEntropy(nn.Linear(WIDTH * passive, 1))
    label = LabelParty(labels(rows), objective, device="cpu", **options)
    others = [
        PassiveParty(
            features(i + 1, rows),
            nn.Linear(COLUMNS, WIDTH),
            device="cpu",
            optimizer=ADAM,
        )
        for i in range(passive)
    ]
    return label, others


def train(
    parties: Sequence[Any], epochs: int = 2, **options: Any
) -> tuple[VerticalStrategy, Result]:
    """Train some parties in this process; return the strategy and its result."""
    strategy = VerticalStrategy(**{"batch_size": 16, "progress": False, **options})
    return strategy, strategy.start(in_process(parties), num_rounds=epochs)


def weights(*parties: LabelParty | PassiveParty) -> list[Tensor]:
    """Return copies of all weights of some parties."""
    found: list[Tensor] = []
    for party in parties:
        state = party.state_dict()
        for part in ("model", "objective", "aggregation"):
            found += [w.clone() for w in state.get(part, {}).values()]
    return found


def final_states(folder: Path, tag: str = "final") -> dict[str, dict[str, Any]]:
    """Return the checkpoint ``tag`` of every party below a folder."""
    parties = sorted(path for path in folder.iterdir() if path.name != "strategy")
    return {path.name: DirectoryStore(path).load(tag) for path in parties}


def assert_equal(ours: Any, theirs: Any, path: str = "") -> None:
    """Compare nested states to the last bit."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs), path
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(a, b, f"{path}[{i}]")
    else:
        assert ours == theirs, path


def losses(result: Result) -> dict[int, float]:
    """Return the training loss of each epoch."""
    return {e: float(m["loss"]) for e, m in result.train_metrics_clientapp.items()}  # type: ignore[arg-type]


def scores(result: Result) -> dict[int, dict[str, Any]]:
    """Return the evaluation of each epoch."""
    return {e: dict(m) for e, m in result.evaluate_metrics_clientapp.items()}


class HookedGrid(wrapped.WrappedGrid):
    """A grid through which every message of another one passes.

    ``before(message)`` sees each request, ``after(reply)`` each reply; a reply for
    which ``after`` returns None is lost.
    """

    def __init__(
        self,
        inner: Grid,
        before: Callable[[Message], None] = lambda message: None,
        after: Callable[[Message], Message | None] = lambda reply: reply,
    ) -> None:
        super().__init__(inner)
        self.inner, self.before, self.after = inner, before, after

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        for message in messages:
            self.before(message)
            for reply in self.inner.send_and_receive([message], timeout=timeout):
                kept = self.after(reply)
                if kept is not None:
                    yield kept


class PushedGrid(HookedGrid):
    """The same, where several messages may be under way to one node."""

    ordered = True

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids: list[str] = []
        for message in messages:
            self.before(message)
            ids += self.inner.push_messages([message])
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = map(self.after, self.inner.pull_messages(message_ids))
        return [reply for reply in replies if reply is not None]

    def receive(self, message_ids: Iterable[str], timeout: float) -> Iterable[Message]:
        assert isinstance(self.inner, wrapped.ClosableGrid)
        replies = map(self.after, self.inner.receive(message_ids, timeout))
        return [reply for reply in replies if reply is not None]


class StatelessGrid(HookedGrid):
    """Keeps nothing but the bytes of each node's context, as Flower's runtimes do.

    A message is handled by process ``choose(count)``; a process whose number is
    negative is a new one.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int | Sequence[dict[str, Any]],
        run_config: dict[str, Any],
        choose: Callable[[int], int] = lambda count: -1,
    ) -> None:
        super().__init__(InProcessGrid(app, 1))
        if isinstance(nodes, int):
            nodes = [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
        self.app, self.choose, self.count = app, choose, 0
        self.processes: dict[int, dict[tuple[int, int], sessions.Session]] = {}
        self.contexts = {
            11 + i: context_to_proto(
                Context(99, 11 + i, dict(config), RecordDict(), run_config)
            ).SerializeToString()
            for i, config in enumerate(nodes)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return [self.handle(message) for message in messages]

    def handle(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = str(self.count)
        kind = type(context_to_proto(Context(0, 0, {}, RecordDict(), {})))
        context = context_from_proto(kind.FromString(self.contexts[node]))
        process = self.choose(self.count)
        self.count += 1
        outside = sessions.sessions
        sessions.sessions = self.processes.setdefault(process, {})
        if process < 0:
            sessions.forget(context.run_id)
        try:
            reply = self.app(through_wire(message), context)
        finally:
            sessions.sessions = outside
        self.contexts[node] = context_to_proto(context).SerializeToString()
        return through_wire(reply)


def through_wire(message: Message) -> Message:
    """Return what arrives of a message on the other side."""
    proto = message_to_proto(message)
    return message_from_proto(type(proto).FromString(proto.SerializeToString()))
