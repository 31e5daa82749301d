"""Every error names the party and says what to do, and comes as early as it can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
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
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    ROWS,
    WIDTH,
    WrappedGrid,
    features,
    labels,
    simple_parties,
)

from flower_vfl import (
    Batch,
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    MeanSquaredError,
    PartyError,
    PassiveParty,
    VerticalError,
    in_process,
    protocol,
    vertical_client_app,
)
from flower_vfl.aggregation import Aggregation
from flower_vfl.party import Party
from flower_vfl.protocol import Verb
from flower_vfl.strategies import EarlyStopping, VerticalStrategy

TRAINING = {Verb.FORWARD.value, Verb.LABEL.value}


def start(parties: list[Any], epochs: int = 2, **options: Any) -> None:
    options = {"batch_size": 16, "progress": False, **options}
    VerticalStrategy(**options).start(in_process(parties), num_rounds=epochs)


def fails_before_training(parties: list[Any], *words: str, **options: Any) -> str:
    """Check that a run is refused in words, and that no batch was asked for."""
    asked: list[str] = []
    grid = WrappedGrid(
        in_process(parties), lambda m: asked.append(m.metadata.message_type)
    )
    options = {"batch_size": 16, "progress": False, **options}
    with pytest.raises(VerticalError) as caught:
        VerticalStrategy(**options).start(grid, num_rounds=1)
    assert not TRAINING & set(asked)
    assert_words(caught.value, *words)
    return str(caught.value)


def assert_words(error: BaseException, *words: str) -> None:
    for word in words:
        assert word in str(error), str(error)


class Turning(nn.Module):
    """A linear layer that returns something else after some calls in training."""

    def __init__(self, calls: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.left, self.change = nn.Linear(COLUMNS, WIDTH), calls, change

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        output: Tensor = self.linear(x)
        return self.change(output) if self.left < 0 else output


def spoil(value: float) -> Callable[[Tensor], Tensor]:
    def change(output: Tensor) -> Tensor:
        output = output.clone()
        output[1, 2] = value
        return output

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_embedding_that_turns_bad_in_mid_run(value: float) -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), Turning(4, spoil(value)), device="cpu")
    with pytest.raises(PartyError) as caught:
        start([label, one, two])
    assert caught.value.party == "passive-2"
    assert caught.value.step == 5
    assert_words(caught.value, "1 NaN or infinite of 48", "learning rate")


def test_large_but_finite_embeddings_are_accepted() -> None:
    """Their sum overflows, each of them does not."""
    still = partial(torch.optim.SGD, lr=0.0)
    label, (one, _) = simple_parties(optimizer=still)
    label.objective.top.weight.data.zero_()  # type: ignore[union-attr,operator]
    large = Turning(0, lambda x: x * 0 + 3e38)
    two = PassiveParty(features(2), large, still, device="cpu")
    start([label, one, two], epochs=1)
    assert label.step == 3


@pytest.mark.parametrize("who", ["label", "passive-1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_features_are_found_before_training(who: str, value: float) -> None:
    label, passive = simple_parties()
    bad = features(1)
    bad[7, 1] = value
    if who == "label":
        model = nn.Linear(COLUMNS, WIDTH)
        top = nn.Linear(3 * WIDTH, 1)
        label = LabelParty(labels(), CrossEntropy(top), features=bad, model=model)
    else:
        passive[0] = PassiveParty(bad, nn.Linear(COLUMNS, WIDTH))
    fails_before_training([label, *passive], who, "features", "Fill or drop")


@pytest.mark.parametrize(
    ("change", "got"),
    [
        pytest.param(lambda x: x[:-1], "(15, 3)", id="a row less"),
        pytest.param(lambda x: torch.cat([x, x]), "(32, 3)", id="twice the rows"),
        pytest.param(lambda x: x[:, 0], "(16,)", id="1-D"),
        pytest.param(lambda x: (x, x), "tuple", id="a tuple"),
    ],
)
def test_a_bottom_model_with_the_wrong_output(
    change: Callable[[Tensor], Tensor], got: str
) -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), Turning(1, change), device="cpu")
    with pytest.raises(PartyError) as caught:
        start([label, one, two])
    assert (caught.value.party, caught.value.step) == ("passive-2", 2)
    assert_words(caught.value, got, "16 rows", "one row per input row")


def test_a_bottom_model_with_the_wrong_output_from_the_start() -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), nn.Sequential(nn.Linear(COLUMNS, 3), nn.Flatten(0)))
    fails_before_training([label, one, two], "passive-2", "one row per input row")


def test_rows_that_get_lost_on_the_way_are_noticed_by_the_label_party() -> None:
    label, passive = simple_parties()
    grid = in_process([label, *passive])

    def drop_row(reply: Message) -> Message:
        records = reply.content.array_records
        if reply.metadata.message_type == Verb.FORWARD and "passive-1" in str(records):
            record = next(iter(records.values()))
            array = protocol.to_tensor(record["passive-1"])
            record["passive-1"] = protocol.to_array(array[:-1])
        return reply

    with pytest.raises(PartyError) as caught:
        VerticalStrategy(batch_size=16).start(WrappedGrid(grid, after=drop_row))
    assert (caught.value.party, caught.value.step) == ("passive-1", 1)
    assert_words(caught.value, "(15, 3)", "(16, 3) was agreed on")


def test_two_parties_of_one_name() -> None:
    label, passive = simple_parties()
    for party in passive:
        party.name = "shop"
    fails_before_training([label, *passive], "'shop'", "two parties", "own name")


def test_no_label_party() -> None:
    _, passive = simple_parties()
    fails_before_training(passive, "no label party", "passive-1, passive-2", "role=")


def test_two_label_parties() -> None:
    label, passive = simple_parties()
    other, _ = simple_parties(name="other")
    fails_before_training([label, other, *passive], "label, other", "exactly one")


def test_only_a_label_party() -> None:
    label, _ = simple_parties()
    with pytest.raises(ConfigError, match="at least one passive party"):
        in_process([label])
    app = vertical_client_app(lambda context: simple_parties()[1][0], lambda c: label)
    strategy = VerticalStrategy(parties=1)
    with pytest.raises(ConfigError, match=r"'label' is alone.*passive"):
        strategy.start(InProcessGrid(app, 1))
    with pytest.raises(ConfigError, match=r"1 of 2 parties.*SuperNodes"):
        VerticalStrategy().start(InProcessGrid(app, 1), timeout=0.05)
    with pytest.raises(ConfigError, match="3 nodes are there, 2 parties"):
        VerticalStrategy(parties=2).start(InProcessGrid(app, 3))


@pytest.mark.parametrize(
    ("classes", "bad", "words"),
    [
        (2, 2, ["from 0 to 1", "the first is 2"]),
        (2, -1, ["from 0 to 1", "the first is -1"]),
        (2, 0.5, ["whole numbers", "the first is 0.5"]),
        (2, float("nan"), ["1 of 60", "missing or infinite", "drop or fill"]),
        (4, -1, ["from 0 to 3", "the first is -1"]),
        (4, 7, ["from 0 to 3", "the first is 7"]),
        (4, float("inf"), ["missing or infinite"]),
        (0, float("nan"), ["missing or infinite", "drop or fill"]),
    ],
)
def test_labels_outside_the_task(classes: int, bad: float, words: list[str]) -> None:
    values = labels().double()
    values[5] = bad
    top = nn.Linear(2 * WIDTH, classes if classes > 2 else 1)
    objective = CrossEntropy(top, classes) if classes else MeanSquaredError(top)
    _, passive = simple_parties()
    label = LabelParty(values, objective, name="bank", device="cpu")
    fails_before_training([label, *passive], "'bank'", *words)


def test_labels_with_two_columns() -> None:
    _, passive = simple_parties()
    label = LabelParty(torch.zeros(ROWS, 2), CrossEntropy(nn.Linear(6, 1)))
    fails_before_training([label, *passive], "'label'", "one number per row")


def test_fewer_labels_than_rows_of_features() -> None:
    _, passive = simple_parties()
    label = LabelParty(
        labels()[:-2],
        CrossEntropy(nn.Linear(9, 1)),
        features=features(0),
        model=nn.Linear(COLUMNS, WIDTH),
    )
    fails_before_training([label, *passive], "'label'", "60 rows", "58 labels")


def test_an_unknown_aggregation_lists_the_known_ones() -> None:
    known = "known: concat, max, mean, product, sum"
    with pytest.raises(ConfigError, match=f"'average'; {known}"):
        VerticalStrategy(aggregation="average")
    with pytest.raises(ConfigError, match=known):
        Aggregation("average")
    with pytest.raises(ConfigError, match=known):
        simple_parties(aggregation="average")


@pytest.mark.parametrize("own", ["concat", Aggregation("max")])
def test_two_places_that_disagree_on_the_aggregation(own: str | nn.Module) -> None:
    label, passive = simple_parties(aggregation=own)
    fails_before_training(
        [label, *passive], "'label'", "the strategy to 'sum'", aggregation="sum"
    )


@pytest.mark.parametrize(("rows", "kind"), [(58, "fewer"), (63, "more")])
def test_a_party_with_another_number_of_ids(rows: int, kind: str) -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2, rows), nn.Linear(COLUMNS, WIDTH), name="shop")
    fails_before_training(
        [label, one, two], "'shop'", f"{kind} ids", f"{rows} rows", "common ids"
    )


def with_ids(ids: Any, others: Any) -> list[Party]:
    label, passive = simple_parties()
    label.ids = others
    for party in passive:
        party.ids = others
    passive[1].ids = ids
    return [label, *passive]


def test_ids_in_another_order() -> None:
    ids = [f"customer-{i}" for i in range(ROWS)]
    message = fails_before_training(
        with_ids(ids[1:] + ids[:1], ids), "'passive-2'", "ids differ", "same order"
    )
    assert "customer" not in message


def test_equal_ids_of_different_types_of_list_are_accepted() -> None:
    ids = list(range(ROWS))
    for same in (np.arange(ROWS), [np.int64(i) for i in ids], tuple(ids)):
        start(with_ids(same, ids), epochs=1)


def test_duplicate_ids() -> None:
    ids = np.arange(ROWS)
    ids[4] = ids[5]
    fails_before_training(
        with_ids(ids, np.arange(ROWS)), "'passive-2'", "1 of its 60", "drop or merge"
    )


def test_another_number_of_ids_than_rows() -> None:
    ids = np.arange(ROWS)
    fails_before_training(with_ids(ids[1:], ids), "'passive-2'", "59 ids for 60 rows")


@pytest.mark.parametrize("who", ["one", "different"])
def test_a_split_that_is_not_everybodys(who: str) -> None:
    codes = np.zeros(ROWS, dtype=np.int8)
    codes[:10] = 2
    label, passive = simple_parties()
    passive[1].split = codes
    if who == "different":
        label.split = passive[0].split = codes[::-1].copy()
    fails_before_training([label, *passive], "'passive-2'", "split", "same")


def test_unknown_split_codes() -> None:
    label, passive = simple_parties()
    for party in (label, *passive):
        party.split = np.full(ROWS, 3, dtype=np.int8)
    fails_before_training([label, *passive], "'label'", "codes", "'train': 0")


def test_a_top_model_that_is_too_narrow() -> None:
    _, passive = simple_parties()
    label = LabelParty(labels(), CrossEntropy(nn.Linear(WIDTH, 1)), name="bank")
    fails_before_training(
        [label, *passive], "'bank'", "passive-1 (3,), passive-2 (3,)", "as wide as"
    )


def test_a_top_model_with_too_many_outputs() -> None:
    _, passive = simple_parties()
    label = LabelParty(labels(), CrossEntropy(nn.Linear(2 * WIDTH, 2)), name="bank")
    fails_before_training([label, *passive], "'bank'", "one output column")


def test_a_sum_of_different_widths() -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), nn.Linear(COLUMNS, WIDTH + 1))
    fails_before_training(
        [label, one, two], "passive-2: (4,)", "same width", aggregation="sum"
    )


def test_a_learning_rate_for_an_unknown_party() -> None:
    label, passive = simple_parties()
    fails_before_training(
        [label, *passive],
        "learning rate is set for shop",
        "label, passive-1, passive-2",
        learning_rate={"shop": 0.1},
    )
    with pytest.raises(ConfigError, match="'shop' must be positive"):
        VerticalStrategy(learning_rate={"shop": 0.0})


class Transform:
    """A transform made of a function."""

    def __init__(
        self, function: Callable[[Tensor, Batch], Tensor], requires_labels: bool = False
    ) -> None:
        self.function, self.requires_labels = function, requires_labels

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        return self.function(gradient, batch)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda g, b: g[:, :2], ["(16, 2)", "(16, 3)"]),
        (lambda g, b: g / (b.party != "passive-2"), ["NaN or infinite"]),
    ],
)
def test_a_transform_that_spoils_a_gradient(
    function: Callable[[Tensor, Batch], Tensor], words: list[str]
) -> None:
    def at_step_two(gradient: Tensor, batch: Batch) -> Tensor:
        late = batch.step == 2 and batch.party == "passive-2"
        return function(gradient, batch) if late else gradient

    label, passive = simple_parties(trust_server=True)
    before = [p.clone() for party in passive for p in party.model.parameters()]
    with pytest.raises(PartyError) as caught:
        start([label, *passive], transforms=[Transform(at_step_two)])
    assert (caught.value.party, caught.value.step) == ("passive-2", 2)
    assert_words(caught.value, "Transform", "Correct the transform", *words)
    assert [party.step for party in passive] == [1, 1]  # nobody went ahead
    after = [p for party in passive for p in party.model.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("requires_labels", [False, True])
def test_a_transform_at_the_strategy_needs_trust(requires_labels: bool) -> None:
    label, passive = simple_parties()
    transform = Transform(lambda gradient, batch: gradient, requires_labels)
    with pytest.raises(PartyError) as caught:
        start([label, *passive], transforms=[transform])
    assert caught.value.party == "label"
    words = ("raw gradients", "trust-server=true", 'placement="label"')
    assert_words(caught.value, *words)
    assert label.step == 0


def trusting_app(seen: dict[str, Any], **node_config: Any) -> InProcessGrid:
    seen["label"], seen["passive"] = simple_parties()
    app = vertical_client_app(
        lambda c: seen["passive"][int(c.node_config["i"])],  # type: ignore[arg-type]
        lambda c: seen["label"],
    )
    configs = [{"role": "passive", "name": f"p{i}", "i": i} for i in range(2)]
    return InProcessGrid(app, [{"role": "label", **node_config}, *configs])


def test_a_transform_that_requires_labels_gets_those_of_the_batch() -> None:
    seen: dict[str, Any] = {}
    grid = trusting_app(seen, **{"trust-server": True})
    got: list[tuple[str, int, int, Tensor | None]] = []

    def note(gradient: Tensor, batch: Batch) -> Tensor:
        got.append((batch.party, batch.epoch, batch.step, batch.labels))
        return gradient

    strategy = VerticalStrategy(batch_size=16, transforms=[Transform(note, True)])
    strategy.start(grid, num_rounds=2)
    assert len(got) == 2 * 2 * 3
    for _, epoch, step, found in got:
        rows = seen["label"].schedule.training_rows(epoch, (step - 1) % 3)
        assert found is not None
        assert torch.equal(found, labels()[rows].float())
    quiet: list[Tensor | None] = []

    def note_labels(gradient: Tensor, batch: Batch) -> Tensor:
        quiet.append(batch.labels)
        return gradient

    strategy = VerticalStrategy(transforms=[Transform(note_labels)])
    strategy.start(grid, num_rounds=1)
    assert quiet == [None, None]


@pytest.mark.parametrize("value", ["false", "true", 1])
def test_trust_must_be_said_clearly(value: object) -> None:
    grid = trusting_app({}, **{"trust-server": value})
    with pytest.raises(PartyError, match=r"'label'.*trust-server must be true or"):
        VerticalStrategy().start(grid)


def test_early_stopping_without_validation_rows() -> None:
    label, passive = simple_parties()
    fails_before_training(
        [label, *passive],
        "validation rows",
        "valid_fraction",
        early_stopping=EarlyStopping(),
    )
    with pytest.raises(ConfigError, match="evaluate_every"):
        VerticalStrategy(early_stopping=EarlyStopping(), evaluate_every=0)


def test_early_stopping_on_a_metric_that_does_not_exist() -> None:
    label, passive = simple_parties()
    with pytest.raises(ConfigError, match=r"'valid_f1'.*valid_accuracy"):
        start(
            [label, *passive],
            valid_fraction=0.2,
            early_stopping=EarlyStopping(metric="f1"),
        )


def run_with_losses(lost: Callable[[Message, int], bool], **options: Any) -> list[Any]:
    """Train; return weights and how often each request was sent."""
    label, passive = simple_parties()
    sent: dict[str, int] = {}

    def count(message: Message) -> None:
        key = f"{message.metadata.dst_node_id}-{message.metadata.group_id}"
        sent[key] = sent.get(key, 0) + 1

    def lose(reply: Message) -> Message | None:
        key = f"{reply.metadata.src_node_id}-{reply.metadata.group_id}"
        return None if lost(reply, sent[key]) else reply

    grid = WrappedGrid(in_process([label, *passive]), count, lose)
    VerticalStrategy(batch_size=16, **options).start(grid, num_rounds=2, timeout=7)
    models = [label.objective, *(party.model for party in passive)]
    weights = [w for model in models for w in model.state_dict().values()]
    return [weights, max(sent.values())]


def test_a_party_that_vanishes() -> None:
    def lost(reply: Message, sent: int) -> bool:
        return reply.metadata.src_node_id == 3 and int(reply.metadata.group_id) > 6

    with pytest.raises(PartyError) as caught:
        run_with_losses(lost, retries=2)
    assert (caught.value.party, caught.value.step) == ("passive-2", 3)
    assert_words(caught.value, "3 requests within 7 s", "log", "resume")


def test_a_lost_reply_is_asked_for_again_and_trained_once() -> None:
    expected, once = run_with_losses(lambda reply, sent: False)
    assert once == 1

    def lost(reply: Message, sent: int) -> bool:
        return int(reply.metadata.group_id) % 2 == 0 and sent == 1

    found, twice = run_with_losses(lost)
    assert twice == 2
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ErrorCode.NODE_UNAVAILABLE, None),
        (ErrorCode.CLIENT_APP_CRASHED, None),
        (ErrorCode.INVALID_FAB, "its ClientApp failed: for a test"),
    ],
)
def test_what_flower_reports_about_a_message(code: int, words: str | None) -> None:
    label, passive = simple_parties()
    left = {"errors": 1}

    def fail_once(reply: Message) -> Message:
        if reply.metadata.src_node_id == 2 and left["errors"]:
            left["errors"] -= 1
            failed = Message(Error(code, "for a test"), reply_to=reply)
            failed.metadata.__dict__["_src_node_id"] = 2
            return failed
        return reply

    grid = WrappedGrid(in_process([label, *passive]), after=fail_once)
    strategy = VerticalStrategy(batch_size=16)
    if words is None:
        strategy.start(grid, num_rounds=1)
        assert label.step == 3
    else:
        with pytest.raises(PartyError, match=words):
            strategy.start(grid, num_rounds=1)
    assert left["errors"] == 0


def test_a_client_app_that_raises() -> None:
    label, _ = simple_parties()

    def passive(context: Context) -> PassiveParty:
        raise FileNotFoundError("shop.csv")

    grid = InProcessGrid(vertical_client_app(passive, lambda context: label), 2)
    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(grid)
    assert caught.value.party == "passive-1"
    assert_words(caught.value, "FileNotFoundError: shop.csv", "log")

    broken = ClientApp()  # not one of ours: answers no query
    with pytest.raises(PartyError, match=r"'node-1'.*ClientApp failed.*log"):
        VerticalStrategy().start(InProcessGrid(broken, 2))


def test_a_reply_that_is_not_one_of_ours() -> None:
    app = ClientApp()

    @app.query("vfl_hello")
    def hello(message: Message, context: Context) -> Message:
        records = RecordDict({"metrics": MetricRecord({"loss": 1.0})})
        return Message(records, reply_to=message)

    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(InProcessGrid(app, 2))
    assert_words(caught.value, "'node-1'", "not one of flower-vfl's", "vertical_client")


def test_a_reply_without_its_embedding() -> None:
    label, passive = simple_parties()

    def rename_embedding(reply: Message) -> Message:
        of_second = reply.metadata.src_node_id == 3
        if of_second and reply.metadata.message_type == Verb.FORWARD:
            for record in reply.content.array_records.values():
                record["other"] = record.pop("passive-2")
        return reply

    grid = WrappedGrid(in_process([label, *passive]), after=rename_embedding)
    with pytest.raises(PartyError, match=r"'passive-2', step 1.*no embedding.*version"):
        VerticalStrategy().start(grid)


def test_another_version_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    label, passive = simple_parties()
    old = protocol.pack_description

    def of_the_future(*args: Any) -> dict[str, Any]:
        return {**old(*args), "protocol": protocol.VERSION + 1}

    monkeypatch.setattr("flower_vfl.verbs.pack_description", of_the_future)
    fails_before_training(
        [label, *passive], "'label'", "version", "Install the same flower-vfl"
    )


def test_other_versions_of_packages_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = iter(["flwr 1", "flwr 1", "flwr 2"])
    monkeypatch.setattr("flower_vfl.verbs.versions", lambda: next(texts))
    label, passive = simple_parties()
    start([label, *passive], epochs=1)
    assert "passive-2: flwr 2" in caplog.text


def test_a_factory_that_returns_the_wrong_role() -> None:
    label, _ = simple_parties()
    app = vertical_client_app(lambda c: label, lambda c: label)  # type: ignore[arg-type,return-value]
    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(InProcessGrid(app, 2))
    assert_words(caught.value, "'passive-1'", "passive node returned a LabelParty")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["node 2 has no role", "--node-config", "role="]),
        ({"role": "boss"}, ["unknown role 'boss'", "known: label, passive"]),
    ],
)
def test_a_node_without_a_role(config: dict[str, str], words: list[str]) -> None:
    label, passive = simple_parties()
    app = vertical_client_app(lambda c: passive[0], lambda c: label)
    with pytest.raises(PartyError) as caught:
        VerticalStrategy().start(InProcessGrid(app, [{"role": "label"}, config]))
    assert_words(caught.value, "'node-2'", *words)


def test_a_loss_that_explodes_is_the_label_partys() -> None:
    label, passive = simple_parties()
    with pytest.raises(PartyError) as caught:
        start([label, *passive], learning_rate=1e25, epochs=20)
    assert caught.value.step is not None
    assert_words(caught.value, "learning rate")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"test_fraction": 1.0}, "test_fraction must be in"),
        ({"test_fraction": 0.5, "valid_fraction": 0.5}, "no training rows"),
    ],
)
def test_fractions_that_leave_nothing(options: dict[str, float], words: str) -> None:
    label, passive = simple_parties()
    fails_before_training([label, *passive], "label", words, **options)


def test_a_split_without_training_rows() -> None:
    label, passive = simple_parties()
    for party in (label, *passive):
        party.split = np.full(ROWS, 2, dtype=np.int8)
    fails_before_training([label, *passive], "'label'", "no training rows", "smaller")


def test_parties_without_rows() -> None:
    label, passive = simple_parties(rows=0)
    fails_before_training([label, *passive], "'label'", "no training rows")


@pytest.mark.parametrize(
    "name",
    ["batch_size", "evaluate_every", "checkpoint_every", "retries", "threads"],
)
def test_negative_settings(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must not be negative"):
        VerticalStrategy(**{name: -1})  # type: ignore[arg-type]


def test_settings_that_flower_knows_and_vertical_training_does_not() -> None:
    grid = in_process([simple_parties()[0], *simple_parties()[1]])
    strategy = VerticalStrategy()
    arrays = ArrayRecord([np.zeros(2)])
    config = ConfigRecord({"lr": 0.1})
    with pytest.raises(ConfigError, match="initial_arrays"):
        strategy.start(grid, initial_arrays=arrays)
    with pytest.raises(ConfigError, match="train_config"):
        strategy.start(grid, train_config=config)
    with pytest.raises(ConfigError, match="num_rounds"):
        strategy.start(grid, num_rounds=0)
    with pytest.raises(ConfigError, match="call start or connect first"):
        strategy.predict()
    strategy.start(grid, num_rounds=1)
    with pytest.raises(ConfigError, match="known: test, train, valid"):
        strategy.predict("validation")


def test_a_failed_hello_can_be_repeated_on_the_same_grid() -> None:
    """In a notebook the data is corrected and the cell run again."""
    label, passive = simple_parties()
    for party in (label, *passive):
        party.ids = list(range(ROWS))
    bad = features(2)
    bad[0, 0] = float("nan")
    passive[1].features, good = (bad,), passive[1].features
    grid = in_process([label, *passive])
    strategy = VerticalStrategy(batch_size=16, progress=False)
    with pytest.raises(PartyError, match=r"passive-2.*NaN"):
        strategy.start(grid, num_rounds=1)
    passive[1].features = good
    strategy.start(grid, num_rounds=1)
    assert label.step == 3
