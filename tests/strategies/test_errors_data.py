"""Features, labels, ids and splits that cannot be trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from error_cases import fails_before_training, start
from torch import nn
from vertical_cases import COLUMNS, ROWS, WIDTH, features, labels, simple_parties

from flower_vfl import (
    CrossEntropy,
    LabelParty,
    MeanSquaredError,
    PartyError,
    PassiveParty,
    in_process,
)
from flower_vfl.parties.base import Party
from flower_vfl.strategies import VerticalStrategy


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
    ("classes", "bad", "words"),
    [
        (2, 2, ["from 0 to 1", "the first in row 5"]),
        (2, -1, ["from 0 to 1", "the first in row 5"]),
        (2, 0.5, ["whole numbers", "the first in row 5"]),
        (2, float("nan"), ["1 of 60", "missing or infinite", "drop or fill"]),
        (4, -1, ["from 0 to 3", "the first in row 5"]),
        (4, 7, ["from 0 to 3", "the first in row 5"]),
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
