from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from foreign_apps import DOCUMENT, Outcome, documented, run_tumours
from torch import Tensor

from flower_vfl import InProcessGrid
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.strategies import (
    Iso,
    NoDefense,
    PerParty,
    Scheduled,
    defended_grid,
    defense_mod,
)
from flower_vfl.transform import Batch

TYPE = "train.apply_gradients"


class Toy:
    """Keeps what it was called with and returns what `change` makes of it."""

    def __init__(
        self,
        change: Callable[[Tensor], Tensor | None] = lambda g: g + 1,
        requires_labels: bool = False,
    ) -> None:
        self.change, self.requires_labels = change, requires_labels
        self.batches: list[Batch] = []

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        self.batches.append(batch)
        batch.metrics["size"] = float(gradient.numel())
        return self.change(gradient)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.fixture
def arrived() -> list[Message]:
    return []


@pytest.fixture
def inner(arrived: list[Message]) -> Iterator[InProcessGrid]:
    def client(message: Message, context: Context) -> Message:
        arrived.append(message)
        return Message(RecordDict(), reply_to=message)

    with InProcessGrid(client, 3) as grid:  # type: ignore[arg-type]
        yield grid


def message(
    *gradients: np.ndarray | Tensor, node: int = 1, kind: str = TYPE, **more: Any
) -> Message:
    arrays = {f"g{i}": Array(np.asarray(g)) for i, g in enumerate(gradients)}
    return Message(RecordDict({"grads": ArrayRecord(arrays), **more}), node, kind)


def value(message: Message, key: str = "g0") -> np.ndarray:
    return message.content["grads"][key].numpy()


def rows(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# --- an app that someone else wrote ---------------------------------------------------


@pytest.fixture(scope="module")
def before() -> Outcome:
    return run_tumours(InProcessGrid)


def test_without_a_defense_the_app_trains_as_before(before: Outcome) -> None:
    after = run_tumours(InProcessGrid, defense="none")
    assert len(after.weights) == 6  # two clinics and the head, weight and bias
    assert after.weights.keys() == before.weights.keys()
    for name, weight in after.weights.items():
        assert torch.equal(weight, before.weights[name]), name
    assert after.auc == before.auc


def test_marvell_lowers_the_leak_auc_of_the_app(before: Outcome) -> None:
    after = run_tumours(InProcessGrid, defense="marvell:s=4", seed=1)
    assert before.leaks()["cosine"] > 0.95
    assert after.leaks()["cosine"] < before.leaks()["cosine"] - 0.2
    assert after.leaks()["norm"] < max(before.leaks()["norm"], 0.6)
    assert after.auc > 0.9
    for defense, run in (("before", before), ("`marvell:s=4`", after)):
        shown = documented("`defended_grid`", defense)
        assert shown == pytest.approx([run.auc, *run.leaks().values()], abs=0.03)


@pytest.mark.parametrize(("column", "adapter"), [(0, defended_grid), (1, defense_mod)])
def test_the_settings_of_the_documentation(column: int, adapter: Any) -> None:
    table = DOCUMENT.read_text().partition("## Settings\n\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
    parameters = inspect.signature(adapter).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [row[column].strip(" `") for row in rows if row[column].strip()] == known
    defaults = {str(p.default) for p in parameters} - {"<class 'inspect._empty'>"}
    assert {row[2].strip().split("`")[-2] for row in rows} == defaults


# --- what is sent ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 4, 3), (5,), (0, 3)])
def test_what_arrives_is_what_the_transform_returns(
    inner: InProcessGrid, arrived: list[Message], shape: tuple[int, ...], dtype: str
) -> None:
    gradient = rows(*shape, dtype=dtype)
    grid = defended_grid(inner, Iso(t=2.0), message_type=TYPE, record="grads", seed=5)
    original = message(gradient, node=2)
    grid.push_messages([original])
    wanted = Iso(t=2.0)(torch.from_numpy(gradient), Batch("2", 1, seed=5))
    assert wanted is not None
    array = arrived[0].content["grads"]["g0"]
    assert (array.dtype, array.shape, array.stype) == (dtype, shape, "numpy.ndarray")
    np.testing.assert_array_equal(array.numpy(), wanted.numpy())
    np.testing.assert_array_equal(value(original), gradient)  # the app's own


def test_both_ways_of_sending_are_defended_once(
    inner: InProcessGrid, arrived: list[Message]
) -> None:
    grid = defended_grid(inner, Toy(), message_type=TYPE)
    gradient = rows(4, 2)
    ids = list(grid.push_messages(message(gradient, node=n) for n in (1, 2)))
    assert len(list(grid.pull_messages(ids))) == 2
    assert len(list(grid.send_and_receive([message(gradient)], timeout=9.0))) == 1
    for sent in arrived:
        np.testing.assert_array_equal(value(sent), gradient + 1)


def test_everything_else_goes_through_as_it_is(
    inner: InProcessGrid, arrived: list[Message]
) -> None:
    grid = defended_grid(inner, Toy(), message_type=TYPE, record="grads", arrays=["g0"])
    other = message(rows(4, 2), kind="query.generate_embeddings")
    extra = {
        "rows": ArrayRecord([np.arange(4)]),
        "config": ConfigRecord({"lr": 0.1}),
    }
    mixed = message(rows(4, 2), np.arange(4), **extra)
    grid.push_messages([other, mixed])
    assert arrived[0] is other
    content = arrived[1].content
    assert list(content) == ["grads", "rows", "config"]
    assert list(content["grads"]) == ["g0", "g1"]
    for record in ("rows", "config"):
        assert content[record] is extra[record]
    assert content["grads"]["g1"] is mixed.content["grads"]["g1"]
    assert arrived[1].metadata is mixed.metadata  # gets the message id


def test_no_defense_sends_the_very_array(
    inner: InProcessGrid, arrived: list[Message]
) -> None:
    sent = message(rows(4, 2))
    defended_grid(inner, NoDefense(), message_type=TYPE).push_messages([sent])
    assert arrived[0].content["grads"]["g0"] is sent.content["grads"]["g0"]


def test_train_is_the_default_action_of_train(
    inner: InProcessGrid, arrived: list[Message]
) -> None:
    grid = defended_grid(inner, Toy(), message_type=["train", "query.ask"])
    kinds = ("train", "train.default", "query.ask", "train.other")
    grid.push_messages([message(np.zeros((1, 1)), kind=kind) for kind in kinds])
    assert [value(sent).item() for sent in arrived] == [1, 1, 1, 0]


# --- noise ----------------------------------------------------------------------------


def noise(arrived: list[Message], gradient: np.ndarray) -> list[bytes]:
    return [(value(sent) - gradient).round(4).tobytes() for sent in arrived]


def test_no_two_gradients_get_the_same_noise(
    inner: InProcessGrid, arrived: list[Message]
) -> None:
    transform = Toy()
    grid = defended_grid(inner, transform, message_type=TYPE)
    for step in range(3):
        messages = [message(rows(4, seed=step), rows(4), node=n) for n in (1, 2, 3)]
        grid.push_messages(messages)
    drawn = {tuple(b.generator().get_state().tolist()) for b in transform.batches}
    # g1 is the same array each time, and is sent with the noise it had
    assert len(transform.batches) == 18 and len(drawn) == 3 * (3 + 1)


def test_a_gradient_sent_again_gets_the_same_noise_and_another_does_not(
    inner: InProcessGrid, arrived: list[Message]
) -> None:
    grid = defended_grid(inner, Iso(), message_type=TYPE)
    one, two = rows(4, 3), rows(4, 3, seed=1)
    grid.push_messages([message(g) for g in (one, one, two, one)])
    sent = [value(a) for a in arrived]
    np.testing.assert_array_equal(sent[0], sent[1])
    assert not np.allclose(sent[0] - one, sent[2] - two)
    assert not np.allclose(sent[0], sent[3])
    assert grid.reports == {"1": {"step": 3}}


def test_the_same_noise_does_not_come_on_two_scales(inner: InProcessGrid) -> None:
    transform = Toy(requires_labels=True)
    epochs, labels = iter([1, 2, 2]), iter([[0, 1], [0, 1], [1, 0]])
    grid = defended_grid(
        inner,
        transform,
        message_type=TYPE,
        epoch=lambda message: next(epochs),
        labels=lambda message: next(labels),
    )
    grid.push_messages([message(rows(2, 2)) for _ in range(3)])
    assert [batch.step for batch in transform.batches] == [1, 2, 3]


def test_the_seed_is_secret_unless_it_is_given(
    inner: InProcessGrid, arrived: list[Message]
) -> None:
    for seed in (None, None, 7, 7):
        grid = defended_grid(inner, "iso:t=1", message_type=TYPE, seed=seed)
        grid.push_messages([message(rows(4, 3))])
    first, second, third, fourth = (value(sent) for sent in arrived)
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(third, fourth)


def test_threads_do_not_share_a_step(inner: InProcessGrid) -> None:
    transform = Toy()
    grid = defended_grid(inner, transform, message_type=TYPE)
    sent = [message(rows(2, 2, seed=i)) for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda m: grid.push_messages([m]), sent))
    assert sorted(b.step for b in transform.batches) == list(range(1, 65))


# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 2, 1]),
        [0, 2, 1],
        torch.tensor([[0], [2], [1]]),
        lambda message: {1: [0, 2, 1]}[message.metadata.dst_node_id],
    ],
)
def test_labels_reach_the_transform(inner: InProcessGrid, labels: Any) -> None:
    transform = Toy(requires_labels=True)
    grid = defended_grid(inner, transform, message_type=TYPE, labels=labels)
    grid.push_messages([message(rows(3, 2, 4, 4))])
    assert transform.batches[0].labels is not None
    assert transform.batches[0].labels.tolist() == [0, 2, 1]


def test_labels_can_be_a_variable_that_the_app_sets_later(
    inner: InProcessGrid,
) -> None:
    y = np.arange(10)
    transform = Toy(requires_labels=True)
    grid = defended_grid(
        inner, transform, message_type=TYPE, labels=lambda message: y[batch]
    )
    for batch in (slice(0, 4), slice(4, 10)):
        grid.push_messages([message(y[batch].astype(float))])
    seen = [b.labels.tolist() for b in transform.batches if b.labels is not None]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]


def test_labels_stay_where_they_are_if_nobody_needs_them(inner: InProcessGrid) -> None:
    transform = Toy()
    grid = defended_grid(inner, transform, message_type=TYPE, labels=lambda m: 1 / 0)
    grid.push_messages([message(rows(3, 2))])
    assert transform.batches[0].labels is None


def test_parties_and_epochs(inner: InProcessGrid, arrived: list[Message]) -> None:
    by_party = PerParty({"bank": Toy(lambda g: g * 2), "2": Toy(lambda g: g * 3)})
    by_epoch = Scheduled({3: Toy(lambda g: g * 5)})
    names = {1: "bank", 2: "shop"}
    one, two = np.ones((1, 1)), np.ones((1, 1)) * 7
    for transform, settings in (
        (by_party, {}),
        (by_party, {"party": lambda m: names[m.metadata.dst_node_id]}),
        (by_epoch, {"epoch": lambda m: m.metadata.dst_node_id + 1}),
    ):
        grid = defended_grid(inner, transform, message_type=TYPE, **settings)
        grid.push_messages([message(one, node=1), message(two, node=2)])
    factors = [value(sent).item() for sent in arrived]
    assert factors == [1, 21, 2, 7, 1, 35]


def test_reports(inner: InProcessGrid) -> None:
    grid = defended_grid(inner, Toy(), message_type=TYPE)
    grid.push_messages([message(rows(3, 2), node=1), message(rows(4, 2), node=2)])
    grid.push_messages([message(rows(5, 2), node=2)])
    assert grid.reports == {"1": {"step": 1, "size": 6.0}, "2": {"step": 2, "size": 10}}


def test_a_withheld_gradient_becomes_zeros(
    inner: InProcessGrid, arrived: list[Message], caplog: pytest.LogCaptureFixture
) -> None:
    grid = defended_grid(inner, Toy(lambda g: None), message_type=TYPE)
    with caplog.at_level(logging.WARNING, "flwr"):
        grid.push_messages([message(rows(3, 2), node=3)])
    np.testing.assert_array_equal(value(arrived[0]), np.zeros((3, 2), np.float32))
    assert grid.reports["3"]["withheld"] == 1.0
    assert "party '3', step 1: zeros sent" in caplog.text


# --- nothing leaves undefended --------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "settings", "says"),
    [
        ([rows(3, 2)], {"record": "gradients"}, "the record 'gradients'"),
        ([rows(3, 2)], {"arrays": ["g0", "g9"]}, "'g9'.*has 'g0' in 'grads'"),
        ([], {}, "no arrays"),
        (None, {}, "no arrays"),
        ([rows(3, 2), np.arange(3)], {}, "'g1'.*int64.*arrays="),
        ([np.float32(1.0)], {}, "'g0'.*shape \\(\\).*arrays="),
        ([np.full((3, 2), np.nan)], {}, "party '1': its gradient has 6 NaN"),
        ([rows(4, 2)], {}, "party '1': there are 3 labels for 4 rows"),
        ([rows(3, 2)], {"labels": np.eye(3)}, "9 labels for 3 rows"),
        ([rows(3, 2)], {"labels": ["a", "b", "c"]}, "one number per row"),
        ([rows(3, 2)], {"labels": lambda m: None}, "one number per row"),
        (
            [rows(3, 2)],
            {"transform": Toy(lambda g: g[:2])},
            "party '1', step 1: what Toy made.*\\(2, 2\\).*\\(3, 2\\)",
        ),
        ([rows(3, 2)], {"transform": Toy(lambda g: g.double())}, "float64"),
        ([rows(3, 2)], {"transform": Toy(lambda g: g / 0)}, "infinite"),
    ],
)
def test_nothing_is_sent_if_something_cannot_be_defended(
    inner: InProcessGrid,
    arrived: list[Message],
    bad: list[np.ndarray] | None,
    settings: dict[str, Any],
    says: str,
) -> None:
    given = {"transform": Toy(requires_labels=True), "labels": [0, 1, 0], **settings}
    grid = defended_grid(inner, message_type=TYPE, **given)
    with pytest.raises((ConfigError, PartyError), match=says):
        last = Message(RecordDict(), 1, TYPE) if bad is None else message(*bad)
        grid.push_messages([message(np.ones((3, 2), np.float32)), last])
    assert arrived == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transform": Toy(requires_labels=True)}, "Toy needs labels"),
        ({"message_type": "apply_gradients"}, "apply_gradients.*no type"),
        ({"message_type": []}, "no type"),
        ({"transform": "nothing"}, "unknown defense 'nothing'"),
    ],
)
def test_settings_that_cannot_work(
    inner: InProcessGrid, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        defended_grid(inner, **{"transform": Iso(), "message_type": TYPE, **settings})


def test_a_defense_that_never_ran_is_told(
    inner: InProcessGrid, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        grid = defended_grid(inner, Iso(), message_type="train.apply", record="grads")
        grid.push_messages([message(rows(3, 2)), message(rows(3, 2))])
        assert caplog.text.count(f"'{TYPE}' have a record 'grads' too") == 1
        del grid
        gc.collect()
    assert f"no message was of the type train.apply; there were {TYPE}" in caplog.text


def test_nothing_is_told_of_a_defense_that_ran(
    inner: InProcessGrid, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        grid = defended_grid(inner, Iso(), message_type=TYPE, record="grads")
        grid.push_messages([message(rows(3, 2)), Message(RecordDict(), 1, "query.x")])
        del grid
        gc.collect()
    assert caplog.text == ""


# --- it is a grid ---------------------------------------------------------------------


def test_it_is_the_wrapped_grid_otherwise(inner: InProcessGrid) -> None:
    grid = defended_grid(inner, Iso(), message_type=TYPE)
    assert isinstance(grid, Grid)
    assert grid.run is inner.run
    assert grid.get_node_ids() == [1, 2, 3]
    assert [node.node_id for node in grid.get_nodes()] == [1, 2, 3]
    assert grid.parties() == {}  # only an InProcessGrid has them
    made = grid.create_message(RecordDict(), TYPE, 2, "g", ttl=5.0)
    assert (made.metadata.dst_node_id, made.metadata.ttl) == (2, 5.0)
    with pytest.raises(ConfigError, match="own run"):
        grid.set_run(inner.run)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = grid.nothing_of_the_kind


def test_leaving_it_closes_the_wrapped_grid() -> None:
    closed = []

    class Closable(InProcessGrid):
        def close(self) -> None:
            closed.append(True)
            super().close()

    echo: Any = lambda message, context: message  # noqa: E731
    with defended_grid(Closable(echo, 1), Iso(), message_type=TYPE) as grid:
        assert isinstance(grid, Grid) and not closed
    assert closed == [True]
