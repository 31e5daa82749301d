"""Settings of a defended grid, and that nothing leaves it undefended."""

from __future__ import annotations

import gc
import inspect
import logging
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from grid_cases import TYPE, Toy, message, rows, value
from third_party_apps import DOCUMENT

from flower_vfl import InProcessGrid
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.strategies import Iso, PerParty, Scheduled, defended_grid, defense_mod

# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "adapter"), [(0, defended_grid), (1, defense_mod)])
def test_the_settings_of_the_documentation(column: int, adapter: Any) -> None:
    table = DOCUMENT.read_text().partition("## Settings\n\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
    parameters = inspect.signature(adapter).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [row[column].strip(" `") for row in rows if row[column].strip()] == known
    defaults = {str(p.default) for p in parameters} - {"<class 'inspect._empty'>"}
    assert {row[2].strip().split("`")[-2] for row in rows} == defaults


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
        ({"message_type": "apply_gradients"}, "apply_gradients.*not a valid"),
        ({"message_type": []}, "not a valid"),
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
