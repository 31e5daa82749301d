"""A grid that defends gradients: what it sends, its noise, a third-party app."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from grid_cases import TYPE, Toy, message, rows, value
from third_party_apps import Outcome, documented, run_tumours

from flower_vfl import InProcessGrid
from flower_vfl.errors import ConfigError
from flower_vfl.strategies import Iso, NoDefense, defended_grid
from flower_vfl.transform import Batch

# --- a third-party app ----------------------------------------------------------------


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
    assert before.leaks["cosine"] > 0.95
    assert after.leaks["cosine"] < before.leaks["cosine"] - 0.2
    assert after.leaks["norm"] < max(before.leaks["norm"], 0.6)
    assert after.auc > 0.9
    for defense, run in (("before", before), ("`marvell:s=4`", after)):
        shown = documented("`defended_grid`", defense)
        assert shown == pytest.approx([run.auc, *run.leaks.values()], abs=0.03)


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
    drawn = {tuple(b.noise().integers(4).tolist()) for b in transform.batches}
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
