"""Settings, parties and transforms that cannot work, told as early as can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from error_cases import assert_words, fails_before_training, start
from flwr.app import ArrayRecord, ConfigRecord
from torch import Tensor, nn
from vertical_cases import labels, simple_parties

from flower_vfl import (
    Batch,
    ConfigError,
    InProcessGrid,
    PartyError,
    in_process,
    vertical_client_app,
)
from flower_vfl.parties.aggregation import Aggregation
from flower_vfl.strategies import EarlyStopping, VerticalStrategy


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
    with pytest.raises(ConfigError, match="found 3 nodes, expected 2 parties"):
        VerticalStrategy(parties=2).start(InProcessGrid(app, 3))


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
        start([label, *passive], defense=[Transform(at_step_two)])
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
        start([label, *passive], defense=[transform])
    assert caught.value.party == "label"
    words = ("raw gradients", "trust-server=true", 'at="label"')
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

    strategy = VerticalStrategy(batch_size=16, defense=[Transform(note, True)])
    strategy.start(grid, num_rounds=2)
    assert len(got) == 2 * 2 * 3
    for _, epoch, step, found in got:
        rows = seen["label"].schedule.training_batches(epoch)[(step - 1) % 3]
        assert found is not None
        assert torch.equal(found, labels()[rows].float())
    quiet: list[Tensor | None] = []

    def note_labels(gradient: Tensor, batch: Batch) -> Tensor:
        quiet.append(batch.labels)
        return gradient

    strategy = VerticalStrategy(defense=[Transform(note_labels)])
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
    with pytest.raises(ConfigError, match=r"'valid_gini'.*valid_accuracy"):
        start(
            [label, *passive],
            valid_fraction=0.2,
            early_stopping=EarlyStopping(metric="gini"),
        )


@pytest.mark.parametrize(
    "name",
    ["batch_size", "evaluate_every", "retries", "threads", "evaluation_rows"],
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
