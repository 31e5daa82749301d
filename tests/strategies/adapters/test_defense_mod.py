from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
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
from flwr.clientapp.typing import Mod
from flwr.common.serde import context_from_proto, context_to_proto
from third_party_apps import (
    DIGIT_EPOCHS,
    Outcome,
    digit_client,
    digit_server,
    digits,
    documented,
    rows_of,
    run,
    run_digits,
)
from torch import Tensor

from flower_vfl import InProcessGrid
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.strategies import Iso, NoDefense, PerParty, defense_mod
from flower_vfl.transform import Batch


class Counting:
    """Adds how often it was called, which is its state."""

    requires_labels = False

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        batch.metrics["calls"] = float(self.calls)
        return gradient + self.calls

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Withholding(NoDefense):
    def perturb(self, rows: Tensor, batch: Batch) -> None:  # type: ignore[override]
        return None


class Labelled(NoDefense):
    """Returns the labels as the gradient."""

    requires_labels = True

    def perturb(self, rows: Tensor, batch: Batch) -> Tensor:
        return self.labels(batch, len(rows)).to(rows.dtype)[:, None].expand_as(rows)


@pytest.fixture
def context() -> Context:
    return Context(1, 2, {}, RecordDict(), {})


@pytest.fixture(autouse=True)
def identity() -> None:
    InProcessGrid(ClientApp(), 1).close()  # lets messages be made


def call(
    mod: Mod,
    context: Context,
    gradients: dict[str, Any],
    kind: str = "train.label_step",
    **more: Any,
) -> Message:
    """Have a message answered with gradients by a client that has the mod."""
    arrays = ArrayRecord({key: Array(np.asarray(g)) for key, g in gradients.items()})
    content = RecordDict({"cut": arrays, **more})
    request = Message(RecordDict(), 2, kind)
    return mod(request, context, lambda m, c: Message(content, reply_to=m))


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def restarted(context: Context) -> Context:
    """Return the context as a new process gets it."""
    kind = type(proto := context_to_proto(context))
    return context_from_proto(kind.FromString(proto.SerializeToString()))


# --- a third-party app ----------------------------------------------------------------


@pytest.fixture(scope="module")
def before() -> Outcome:
    return run_digits(InProcessGrid)


def test_without_a_defense_the_app_trains_as_before(before: Outcome) -> None:
    after = run_digits(InProcessGrid, defense=NoDefense())
    assert len(after.weights) == 6  # two halves and the top model, weight and bias
    assert after.weights.keys() == before.weights.keys()
    for name, weight in after.weights.items():
        assert torch.equal(weight, before.weights[name]), name
    assert after.auc == before.auc


@pytest.mark.extra  # test_defended_grid has it for another app
def test_marvell_lowers_the_leak_auc_of_the_app(before: Outcome) -> None:
    assert len(before.received) == 2 * 10 * DIGIT_EPOCHS
    assert before.received[0][0].shape == (128, 2, 8, 4)
    after = run_digits(InProcessGrid, defense="marvell:s=4", seed=1)
    for attack in ("norm", "cosine"):
        assert before.leaks[attack] > 0.95
        assert after.leaks[attack] < before.leaks[attack] - 0.2
    assert after.auc > 0.85
    for defense, ended in (("before", before), ("`marvell:s=4`", after)):
        shown = documented("`defense_mod`", defense)
        assert shown == pytest.approx([ended.auc, *ended.leaks.values()], abs=0.03)


def test_a_process_for_every_message_changes_nothing() -> None:
    together = run_digits(InProcessGrid, defense="iso:t=2", seed=1)

    def alone(message: Message, context: Context) -> Message:
        own = restarted(context)
        reply = digit_client("iso:t=2", 1)(message, own)
        context.state = own.state
        return reply

    def labels(message: Message) -> Tensor:
        return digits()[1][rows_of(message)]

    apart = run(InProcessGrid, alone, 3, digit_server, {}, labels)
    assert apart.auc == together.auc
    for one, other in zip(apart.received, together.received, strict=True):
        np.testing.assert_array_equal(one[0], other[0])


# --- what the reply holds -------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3, 5)])
def test_each_party_gets_what_the_transform_returns(
    context: Context, shape: tuple[int, ...]
) -> None:
    gradients = {"bank": rows(*shape), "shop": rows(*shape, seed=1)}
    numbers = MetricRecord({"loss": 0.5})
    mod = defense_mod(Iso(t=2.0), record="cut", seed=5)
    reply = call(mod, context, gradients, numbers=numbers)
    for party, gradient in gradients.items():
        wanted = Iso(t=2.0)(torch.from_numpy(gradient), Batch(party, 1, seed=5))
        assert wanted is not None
        array = reply.content["cut"][party]
        np.testing.assert_array_equal(array.numpy(), wanted.numpy())
        assert (array.dtype, array.shape) == ("float32", shape)
    assert list(reply.content) == ["cut", "numbers"]
    assert reply.content["numbers"] is numbers


def test_the_reply_of_the_app_is_left_alone(context: Context) -> None:
    kept = RecordDict({"cut": ArrayRecord([rows(3, 2)])})
    mod = defense_mod(Iso())
    request = Message(RecordDict(), 2, "train")
    for _ in range(2):
        mod(request, context, lambda m, c: Message(kept, reply_to=m))
        np.testing.assert_array_equal(kept["cut"]["0"].numpy(), rows(3, 2))


@pytest.mark.parametrize(
    ("party", "factors"),
    [(None, [1, 3]), ("bank", [1, 1]), (lambda m, c: f"shop{c.node_id}", [4, 4])],
)
def test_the_party_is_the_array_or_has_a_name(
    context: Context, party: Any, factors: list[int]
) -> None:
    transform = PerParty({"shop": Labelled(), "shop2": Withholding()})
    mod = defense_mod(transform, labels=lambda m, c: [3, 3], party=party)
    gradients = {"bank": np.ones((2, 1)), "shop": np.ones((2, 1))}
    reply = call(mod, context, gradients)
    got = [reply.content["cut"][key].numpy()[0, 0] or 4 for key in gradients]
    assert got == factors


def test_labels_come_from_the_message_and_the_context(context: Context) -> None:
    context.node_config["offset"] = 10

    def labels(message: Message, context: Context) -> list[int]:
        first = int(message.content["config"]["first"])
        return [first, int(context.node_config["offset"])]

    mod = defense_mod(Labelled(), labels=labels)
    request = Message(RecordDict({"config": ConfigRecord({"first": 7})}), 2, "train")
    content = RecordDict({"cut": ArrayRecord([np.zeros((2, 1))])})
    reply = mod(request, context, lambda m, c: Message(content, reply_to=m))
    assert reply.content["cut"]["0"].numpy().tolist() == [[7.0], [10.0]]


def test_other_messages_and_errors_go_through(context: Context) -> None:
    mod = defense_mod(Iso(), message_type="train.label_step", record="cut")
    reply = call(mod, context, {}, kind="query.embed")
    assert len(reply.content["cut"]) == 0
    request = Message(RecordDict(), 2, "train.label_step")
    failed = Message(Error(1, "no disk"), reply_to=request)
    assert mod(request, context, lambda m, c: failed) is failed
    assert not context.state


def test_a_mod_of_the_whole_app() -> None:
    mod = defense_mod("iso", message_type="train.step", record="cut")
    app = ClientApp(mods=[mod])
    gradient = RecordDict({"cut": ArrayRecord([rows(3, 2)])})

    @app.train("step")
    @app.query("same")
    def step(message: Message, context: Context) -> Message:
        return Message(gradient, reply_to=message)

    with InProcessGrid(app, 1) as grid:
        for kind, same in (("train.step", False), ("query.same", True)):
            (reply,) = grid.send_and_receive([Message(RecordDict(), 1, kind)])
            got = reply.content["cut"]["0"].numpy()
            assert np.array_equal(got, rows(3, 2)) is same


def test_metrics_are_told_only_if_that_is_wanted(context: Context) -> None:
    gradients = {"bank": rows(2, 2), "shop": rows(2, 2)}
    assert list(call(defense_mod(Counting()), context, gradients).content) == ["cut"]
    mod = defense_mod(Counting(), report="defense", record="cut")
    reply = call(mod, context, gradients)
    numbers = {"bank.step": 1, "bank.calls": 1.0, "shop.step": 1, "shop.calls": 2.0}
    assert dict(reply.content["defense"]) == numbers
    with pytest.raises(ConfigError, match="a record 'defense'"):
        call(mod, context, gradients, defense=MetricRecord())


def test_a_withheld_gradient_becomes_zeros(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    mod = defense_mod(Withholding(), report="defense")
    with caplog.at_level(logging.WARNING, "flwr"):
        reply = call(mod, context, {"bank": rows(3, 2)})
    np.testing.assert_array_equal(
        reply.content["cut"]["bank"].numpy(), np.zeros((3, 2))
    )
    assert reply.content["defense"]["bank.withheld"] == 1.0
    assert "Withholding: party 'bank', step 1: zeros sent" in caplog.text


# --- state ----------------------------------------------------------------------------


def test_seed_step_and_state_survive_in_the_context(context: Context) -> None:
    def noises(new: Callable[[], Mod], restart: bool) -> list[np.ndarray]:
        node, mod, got = restarted(context), new(), []
        for step in range(3):
            if restart:
                node, mod = restarted(node), new()
            reply = call(mod, node, {"bank": rows(2, 3, seed=step)})
            got.append(reply.content["cut"]["bank"].numpy() - rows(2, 3, seed=step))
        return got

    counts = noises(lambda: defense_mod(Counting()), restart=True)
    assert [count[0, 0].round() for count in counts] == [1, 2, 3]
    fixed = [noises(lambda: defense_mod(Iso(), seed=3), again) for again in (0, 1)]
    np.testing.assert_array_equal(*fixed)
    secret = noises(lambda: defense_mod(Iso()), restart=True)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not np.allclose(secret[one], secret[other])


def test_a_secret_seed_is_drawn_once_for_a_node(context: Context) -> None:
    gradient = {"bank": rows(2, 3)}
    other = restarted(context)
    first = call(defense_mod(Iso()), context, gradient).content["cut"]["bank"]
    again = call(defense_mod(Iso()), restarted(context), gradient)
    np.testing.assert_array_equal(again.content["cut"]["bank"].numpy(), first.numpy())
    elsewhere = call(defense_mod(Iso()), other, gradient).content["cut"]["bank"]
    assert not np.allclose(elsewhere.numpy(), first.numpy())


def test_nodes_of_one_process_do_not_share_a_state(context: Context) -> None:
    mod, other = defense_mod(Counting()), restarted(context)
    added = [
        call(mod, node, {"bank": np.zeros((1, 1))}).content["cut"]["bank"].numpy()
        for node in (context, other, context, other, other)
    ]
    assert [value.item() for value in added] == [1, 1, 2, 2, 3]


def test_a_simulation_can_pickle_the_mod(context: Context) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")  # what Flower's engine uses
    mod = pickle.loads(cloudpickle.dumps(defense_mod(Iso(), seed=1)))
    assert call(mod, context, {"bank": rows(2, 3)}).has_content()


# --- nothing leaves undefended --------------------------------------------------------


@pytest.mark.parametrize(
    ("gradients", "settings", "says"),
    [
        ({"bank": rows(2, 2)}, {"record": "gradients"}, "the record 'gradients'"),
        ({"bank": rows(2, 2)}, {"arrays": "shop"}, "'shop'.*has 'bank' in 'cut'"),
        ({}, {}, "no arrays"),
        ({"rows": np.arange(2)}, {}, "'rows'.*arrays="),
        ({"bank": np.full((2, 2), np.inf)}, {}, "party 'bank': its gradient has 4"),
        ({"bank": rows(3, 2)}, {}, "party 'bank': there are 2 labels for 3 rows"),
    ],
)
def test_a_reply_that_cannot_be_defended_is_an_error(
    context: Context, gradients: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    mod = defense_mod(Labelled(), labels=[0, 1], **settings)
    with pytest.raises((ConfigError, PartyError), match=says):
        call(mod, context, gradients)
    assert not context.state


def test_labels_must_be_given_if_they_are_needed() -> None:
    with pytest.raises(ConfigError, match="Labelled needs labels"):
        defense_mod(Labelled())
    with pytest.raises(ConfigError, match=r"label_step.*not a valid"):
        defense_mod(Iso(), message_type="label_step")
