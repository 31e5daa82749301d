"""Messages: round trips, repeated requests, and what never travels."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn
from vertical_cases import (
    ROWS,
    WrappedGrid,
    assert_equal,
    features,
    labels,
    make_label,
    make_passive,
    rich_app,
    through_wire,
)

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    PartyError,
    PartyRestartedError,
    PassiveParty,
    in_process,
)
from flower_vfl.arrays import to_array, to_tensor
from flower_vfl.client_app import vertical_client_app
from flower_vfl.protocol import (
    Content,
    Verb,
    error_content,
    gradient_arrays,
    pack,
    pack_description,
    pack_terms,
    raise_error,
    read,
    request,
    unpack_description,
    unpack_terms,
)
from flower_vfl.strategies import VerticalStrategy
from flower_vfl.terms import Description, Terms

DTYPES = [
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (0,), (0, 3), (1,), (5,), (4, 3), (2, 1, 3), (2, 3, 4, 5)]


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_keep_every_bit_and_flower_reads_them(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    array = to_array(tensor)
    assert tuple(array.shape) == shape
    assert array.dtype == str(tensor.numpy().dtype)
    by_flower = array.numpy()
    assert by_flower.dtype == tensor.numpy().dtype
    assert by_flower.tobytes() == tensor.numpy().tobytes()
    assert by_flower.shape == shape
    assert array.data == Array(tensor.numpy()).data  # the very bytes of Flower
    assert same(to_tensor(array), tensor)
    assert same(to_tensor(Array(tensor.numpy())), tensor)
    travelled = pickle.loads(pickle.dumps(array))
    assert type(travelled) is Array
    assert same(to_tensor(travelled), tensor)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[::2], id="every second row"),
        pytest.param(lambda x: x[:, 1:3], id="columns"),
        pytest.param(lambda x: x[:, :1].expand(-1, 4), id="expanded"),
        pytest.param(lambda x: x.requires_grad_() * 2, id="with a graph"),
        pytest.param(lambda x: nn.Parameter(x), id="parameter"),
    ],
)
def test_tensors_of_any_layout(make: Callable[[Tensor], Tensor]) -> None:
    tensor = make(torch.randn(6, 5))
    array = to_array(tensor)
    assert np.array_equal(array.numpy(), tensor.detach().numpy())
    for copy in (to_tensor(array), to_tensor(pickle.loads(pickle.dumps(array)))):
        assert torch.equal(copy, tensor.detach())
        assert not copy.requires_grad


def test_bfloat16_travels_as_float32() -> None:
    tensor = torch.randn(3, 2).bfloat16()
    array = to_array(tensor)
    assert array.dtype == "float32"
    assert same(to_tensor(array), tensor.float())
    assert np.array_equal(array.numpy(), tensor.float().numpy())


def test_arrays_that_flower_made_of_other_layouts() -> None:
    for values in (
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">i4").astype("<i4"),
        np.float32(3.5),
    ):
        found = to_tensor(Array(np.asarray(values))).numpy()
        assert np.array_equal(found, values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: Array(a.dtype, a.shape, a.stype, a.data[:-4]), "cannot be read"),
        (lambda a: Array(a.dtype, a.shape, a.stype, b""), "cannot be read"),
        (lambda a: Array(a.dtype, a.shape, "torch", a.data), "cannot be read"),
        (lambda a: Array("float99", a.shape, a.stype, a.data), "type float99"),
        (lambda a: Array(a.dtype, a.shape, a.stype, a.data[:-3]), "cannot be read"),
        (lambda a: Array(a.dtype, a.shape, a.stype, a.data + b"x"), "cannot be read"),
    ],
)
def test_a_tampered_array(change: Callable[[Array], Array], words: str) -> None:
    good = to_array(torch.randn(3, 2))
    bad = change(Array(good.dtype, good.shape, good.stype, good.data))
    with pytest.raises(ConfigError, match=words):
        to_tensor(bad)
    with pytest.raises(PartyError, match=f"'shop'.*({words}).*version"):
        Content(arrays={"shop": bad}).tensors()


def test_an_array_whose_shape_was_changed_is_not_read_as_another() -> None:
    good = to_array(torch.arange(6.0).reshape(3, 2))
    lied = Array(good.dtype, (2, 3), good.stype, good.data)
    assert torch.equal(to_tensor(lied), torch.arange(6.0).reshape(3, 2))


@pytest.fixture
def grid() -> InProcessGrid:
    """Give Flower's messages the identity they need."""
    return InProcessGrid(rich_app(), 3)


def test_content_survives_the_wire(grid: InProcessGrid) -> None:
    content = Content(
        config={
            "step": 0,
            "epoch": 3,
            "index": 2,
            "gradient-step": 8,
            "text": "ä",
            "flag": True,
            "share": 0.1,
            "key": b"\x00\xff",
            "names": ["a", "b"],
            "sizes": [1, 2],
        },
        arrays=pack({"a": torch.randn(2, 3), "b": torch.zeros(0, 3)}),
        metrics={"loss": 0.1, "rows": 16.0},
        labels=to_array(torch.tensor([1.0, 0.0])),
    )
    found = read(through_wire(request(Verb.LABEL, 1, 77, content)))
    assert found.config == {**content.config, "turn": 77}
    assert found.metrics == content.metrics
    assert list(found.arrays) == ["a", "b"]
    assert_equal(found.tensors(), content.tensors())
    assert found.labels is not None
    assert torch.equal(to_tensor(found.labels), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize(
    "content",
    [
        Content(),
        Content(config={"step": 0}),
        Content(config={"gradient-step": 1}),
        Content(arrays=pack({"a": torch.ones(1)})),
        Content(metrics={"loss": 2.0}),
    ],
    ids=["nothing", "step", "gradient step", "arrays", "metrics"],
)
def test_parts_that_are_absent_stay_absent(
    content: Content, grid: InProcessGrid
) -> None:
    carrier = Message(RecordDict(), 1, Verb.LABEL.value)
    reply = Message(content.records(), reply_to=through_wire(carrier))
    found = read(through_wire(reply))
    assert found.config == content.config
    assert list(found.arrays) == list(content.arrays)
    assert found.metrics == content.metrics
    assert found.labels is None


def test_entries_of_the_wrong_kind() -> None:
    content = Content(config={"flag": True, "text": "x", "share": 0.5, "n": 3})
    assert content.number("n") == 3
    assert content.text("text") == "x"
    for key in ("flag", "text", "share"):
        with pytest.raises(ConfigError, match=f"'{key}' must be a whole number"):
            content.number(key)
    with pytest.raises(ConfigError, match="'n' must be a text"):
        content.text("n")
    with pytest.raises(ConfigError, match="no 'step'"):
        content.number("step")


def test_a_gradient_or_none() -> None:
    gradient = torch.randn(2, 2)
    assert torch.equal(
        Content(arrays=gradient_arrays(to_array(gradient))).gradient(),  # type: ignore[arg-type]
        gradient,
    )
    assert Content(arrays=gradient_arrays(None)).gradient() is None


def test_terms_and_descriptions_round_trip(grid: InProcessGrid) -> None:
    terms = Terms(5, 32, 100, 0.3, 0.1, {"b": (4,), "a": (2, 3, 3)}, "sum", 0.01)
    message = through_wire(request(Verb.AGREE, 1, 1, Content(pack_terms(terms))))
    found = unpack_terms(read(message))
    assert found == terms
    assert list(found.parties) == ["b", "a"]  # the order decides how they are joined
    for description in (
        Description("x", "label", 9, (), "binary", "d1", "", ("best", "step-3")),
        Description("y", "passive", 0, (2, 5)),
    ):
        packed = Content(pack_description(description, "flwr 1"))
        message = through_wire(request(Verb.HELLO, 1, 1, packed))
        assert unpack_description(read(message)) == description


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PartyError("a", "p", "r", 4), PartyError, "party 'a', step 4: p. r"),
        (PartyError("a", "p", "r"), PartyError, "party 'a', step 9: p. r"),
        (PartyError("a", "p", "r", 0), PartyError, "party 'a', step 0: p. r"),
        (PartyRestartedError("a", "p", "r"), PartyRestartedError, "'a', step 9"),
        (ConfigError("no such thing"), PartyError, "'b', step 9: no such thing. Cor"),
        (ZeroDivisionError("x"), PartyError, "'b', step 9: ZeroDivisionError: x. Tha"),
    ],
)
def test_errors_survive_the_wire(
    error: Exception, kind: type[PartyError], text: str, grid: InProcessGrid
) -> None:
    message = through_wire(request(Verb.HELLO, 1, 1, error_content(error, "b")))
    with pytest.raises(kind) as caught:
        raise_error(read(message), 9)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (kind, str(caught.value))


class Node:
    """One node with a context, driven message by message."""

    def __init__(self, number: int = 1, resident: bool = False) -> None:
        self.grid = InProcessGrid(rich_app(), 3)
        self.node = number + 1
        self.context = self.grid._contexts[self.node]
        if not resident:
            self.grid.close()  # no longer marked as one that stays in memory
        self.party = lambda: next(iter(self.grid.parties().values()))

    def ask(self, verb: Verb, turn: int, content: Content | None = None) -> Content:
        message = request(verb, self.node, turn, content or Content())
        reply = self.grid._app(through_wire(message), self.context)
        return read(through_wire(reply))

    def begin(self) -> None:
        greeting: dict[str, Any] = {"seed": 1, "threads": 0, "key": b"k" * 32}
        self.ask(Verb.HELLO, 1, Content(greeting))
        shapes = {"passive-1": (3,), "passive-2": (3,)}
        terms = Terms(1, 16, parties=shapes)
        self.ask(Verb.AGREE, 2, Content(pack_terms(terms)))


def assert_same_content(ours: Content, theirs: Content) -> None:
    assert ours.config == theirs.config
    assert ours.metrics == theirs.metrics
    assert_equal(ours.tensors(), theirs.tensors())


@pytest.mark.parametrize("resident", [True, False])
def test_a_repeated_request_is_answered_again_and_not_trained_twice(
    resident: bool,
) -> None:
    node = Node(1, resident)
    node.begin()
    where = {"epoch": 1, "index": 0, "step": 1}
    first = node.ask(Verb.FORWARD, 3, Content(dict(where)))
    assert_same_content(node.ask(Verb.FORWARD, 3, Content(dict(where))), first)
    gradient = gradient_arrays(to_array(torch.ones(16, 3)))
    second = {"epoch": 1, "index": 1, "step": 2, "gradient-step": 1}
    reply = node.ask(Verb.FORWARD, 4, Content(dict(second), gradient))
    party = node.party()
    weights = [w.clone() for w in party.model.state_dict().values()]  # type: ignore[union-attr]
    random = party.random.state_dict()
    for _ in range(2):
        again = node.ask(Verb.FORWARD, 4, Content(dict(second), gradient))
        assert_same_content(again, reply)
    party = node.party()
    assert party.step == 1
    assert_equal(list(party.model.state_dict().values()), weights)  # type: ignore[union-attr]
    assert_equal(party.random.state_dict(), random)


@pytest.mark.parametrize("resident", [True, False])
def test_an_older_request_is_refused(resident: bool) -> None:
    node = Node(1, resident)
    node.begin()
    where = {"epoch": 1, "index": 0, "step": 1}
    node.ask(Verb.FORWARD, 7, Content(dict(where)))
    for turn in (6, 2, 0):
        with pytest.raises(PartyError, match=f"request {turn} after request 7.*Two"):
            raise_error(node.ask(Verb.FORWARD, turn, Content(dict(where))), 1)
    gradient = gradient_arrays(to_array(torch.ones(16, 3)))
    late = Content({"gradient-step": 1}, gradient)
    assert "error" not in node.ask(Verb.BACKWARD, 8, late).config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"step": 3, "epoch": 1, "index": 0}, "has trained 0 steps.*step 3"),
        ({"step": 1, "epoch": 1, "index": 99}, "no batch 99"),
        ({"step": 1, "epoch": 1}, "no 'index'"),
        ({"step": 1, "epoch": 1, "index": 0, "gradient-step": 1}, "waits for no grad"),
    ],
)
def test_requests_out_of_place(config: dict[str, Any], words: str) -> None:
    node = Node()
    with pytest.raises(PartyRestartedError, match=r"before the hello.*resume"):
        raise_error(node.ask(Verb.FORWARD, 1, Content(dict(config))), None)
    node.begin()
    with pytest.raises(PartyError, match=f"'passive-1'.*{words}"):
        raise_error(node.ask(Verb.FORWARD, 3, Content(dict(config))), None)
    with pytest.raises(PartyError, match="'passive-1' is not the label party"):
        raise_error(node.ask(Verb.LABEL, 4, Content(dict(config))), None)


def test_a_gradient_of_another_step_or_shape_is_refused() -> None:
    node = Node()
    node.begin()
    node.ask(Verb.FORWARD, 3, Content({"epoch": 1, "index": 0, "step": 1}))
    before = [w.clone() for w in node.party().model.state_dict().values()]  # type: ignore[union-attr]
    for turn, step, shape, words in (
        (4, 2, (16, 3), "step 2 and waits for step 1"),
        (5, 1, (16, 2), r"shape \(16, 2\) for an embedding of shape \(16, 3\)"),
    ):
        arrays = gradient_arrays(to_array(torch.ones(*shape)))
        reply = node.ask(Verb.BACKWARD, turn, Content({"gradient-step": step}, arrays))
        with pytest.raises(PartyError, match=words):
            raise_error(reply, None)
    good = gradient_arrays(to_array(torch.ones(16, 3)))
    nan = gradient_arrays(to_array(torch.full((16, 3), float("nan"))))
    reply = node.ask(Verb.BACKWARD, 6, Content({"gradient-step": 1}, nan))
    with pytest.raises(PartyError, match=r"48 NaN.*learning rate"):
        raise_error(reply, None)
    after = list(node.party().model.parameters())  # type: ignore[union-attr]
    assert torch.equal(after[0], before[0])
    assert not node.ask(Verb.BACKWARD, 7, Content({"gradient-step": 1}, good)).config
    assert node.party().step == 1


def test_a_repeated_hello_in_mid_run_changes_nothing() -> None:
    """A second server that looks around must not disturb the first."""

    def weights(disturb: bool) -> list[Tensor]:
        grid = InProcessGrid(rich_app(), 3)
        seen = {"label": 0}

        def hello(message: Message) -> None:
            seen["label"] += message.metadata.message_type == Verb.LABEL.value
            if disturb and seen["label"] == 4:
                seen["label"] += 1
                greeting: dict[str, Any] = {"seed": 1, "threads": 0, "key": b"k" * 32}
                for node in grid.get_node_ids():
                    spy = request(Verb.HELLO, node, 1, Content(dict(greeting)))
                    (reply,) = grid.send_and_receive([spy])
                    assert read(reply).number("rows") == ROWS

        VerticalStrategy(batch_size=16).start(WrappedGrid(grid, hello), num_rounds=2)
        return [
            w
            for party in grid.parties().values()
            for w in party.model.state_dict().values()  # type: ignore[union-attr]
        ]

    assert_equal(weights(True), weights(False))


def needles() -> dict[str, bytes]:
    """Return every form in which data of a row could stand in a message."""
    found: dict[str, bytes] = {}
    for party in range(3):
        x = features(party)
        for row in range(ROWS):
            for kind in (np.float32, np.float64, np.float16):
                data = x[row].numpy().astype(kind)
                found[f"features {party} {row} {kind.__name__}"] = data.tobytes()
    for column in range(4):
        found[f"column {column}"] = features(1)[:16, column].numpy().tobytes()
    y = labels().numpy()
    for kind in (np.float32, np.float64, np.int64, np.int32, np.int8, np.bool_):
        for size in (16, 12):
            found[f"labels {kind.__name__} {size}"] = y[:size].astype(kind).tobytes()
    return found


def test_features_labels_and_ids_never_travel() -> None:
    ids = [f"customer-{i * 7919}" for i in range(ROWS)]
    numbers = [int(i) * 7919 + 10**9 for i in range(ROWS)]

    def label(context: Context) -> LabelParty:
        party = make_label(context)
        party.ids = ids
        return party

    def passive(context: Context) -> PassiveParty:
        party = make_passive(context)
        party.ids = ids if context.node_config["partition-id"] == 1 else None
        return party

    sent: list[bytes] = []
    seen_labels: set[bytes] = set()
    inner = InProcessGrid(vertical_client_app(passive, label), 3)

    def record(message: Message) -> None:
        sent.append(message_to_proto(message).SerializeToString())

    def record_reply(reply: Message) -> Message:
        record(reply)
        return reply

    grid = WrappedGrid(inner, record, record_reply)
    strategy = VerticalStrategy(
        batch_size=16, valid_fraction=0.2, checkpoint_every=2, keep_final=True
    )
    strategy.start(grid, num_rounds=2)
    strategy.predict("train")
    party = inner.parties()["label"]
    schedule = party.agreed()
    for epoch in (1, 2):  # labels in the order of the batches too
        for index in range(3):
            rows = schedule.training_rows(epoch, index)
            values = labels()[rows].numpy()
            for kind in (np.float32, np.float64, np.int64, np.int8):
                seen_labels.add(values.astype(kind).tobytes())
    everything = b"\0".join(sent)
    assert len(everything) > 10_000
    assert b"passive-1" in everything  # the search does find what is there
    embedding = read_embedding(sent)
    assert embedding in everything
    for what, needle in needles().items():
        assert needle not in everything, what
    for needle in seen_labels:
        assert needle not in everything
    for one in ids:
        assert one.encode() not in everything
    assert json.dumps(numbers[:2]).encode() not in everything


def read_embedding(sent: list[bytes]) -> bytes:
    """Return the data of one embedding, found in the bytes of the messages."""
    marker = b"\x93NUMPY"
    carrying = next(data for data in sent if marker in data)
    start = carrying.index(marker)
    length = int.from_bytes(carrying[start + 8 : start + 10], "little")
    return carrying[start + 10 + length : start + 10 + length + 16 * 3 * 4]


def test_trusted_labels_are_the_only_exception() -> None:
    """The search above would find labels if they were sent."""
    torch.manual_seed(0)
    label = LabelParty(
        labels(), CrossEntropy(nn.Linear(3, 1)), device="cpu", trust_server=True
    )
    passive = PassiveParty(features(1), nn.Linear(4, 3), device="cpu")

    class Needs:
        requires_labels = True

        def __call__(self, gradient: Tensor, batch: object) -> Tensor:
            return gradient

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    sent: list[bytes] = []

    def record(reply: Message) -> Message:
        sent.append(message_to_proto(reply).SerializeToString())
        return reply

    grid = WrappedGrid(in_process([label, passive]), after=record)
    VerticalStrategy(batch_size=16, transforms=[Needs()]).start(grid, num_rounds=1)
    rows = label.agreed().training_rows(1, 0)
    assert labels()[rows].float().numpy().tobytes() in b"".join(sent)


def test_a_message_of_another_app_is_refused_politely() -> None:
    node = Node()
    foreign = Message(RecordDict({"c": ConfigRecord({"a": 1})}), 2, Verb.HELLO.value)
    reply = read(node.grid._app(through_wire(foreign), node.context))
    assert "not one of flower-vfl's" in reply.text("error")
    assert TaskIdentity.run_id  # set by the grid
